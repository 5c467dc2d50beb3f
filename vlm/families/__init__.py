"""Families of checkpoints, one torch-free file each: tables and arithmetic, never a forward pass.

Front door: `vlm.families.registry`; `vlm.families.base` says what a family is.
"""
