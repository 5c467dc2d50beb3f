"""Training of the default model on documents it renders itself.

Front door: `vlm.train.cli`.
"""
