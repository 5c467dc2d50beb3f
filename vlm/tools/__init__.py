"""Tools: what a model may call, how calls are written in its answers, and how they are read back.

Front doors: `vlm.tools.forms` and `vlm.tools.parser`.
"""
