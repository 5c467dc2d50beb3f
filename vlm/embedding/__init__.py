"""Embeddings of images and texts by a SigLIP model with its own heads, which open_clip runs.

Front door: `embedder.Embedder`.
"""
