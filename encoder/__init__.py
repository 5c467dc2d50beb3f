"""Tiles to visual tokens: SigLIP tower, connectors, cross-request batcher, visual-token cache.

Front doors: `encoder.encoder_model` (tiles in, rows out) and `encoder.geometry` (token counts, torch-free).
"""
