"""Families of checkpoints, one torch-free file each, by how an image becomes visual tokens: tables and
arithmetic, never a forward pass.

Front door: `vlm.families.registry`; `vlm.families.base` says what a family is.
"""
