"""Who may call, how much at once, and what is refused before a body is read.

Front doors: `vlm.api.guard.routes` (every route is of its class) and `vlm.api.guard.admission`.
"""
