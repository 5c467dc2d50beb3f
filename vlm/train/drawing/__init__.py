"""The documents that the default model learns from: words, fonts, layouts, shapes, places of glyphs.

Front door: `vlm.train.drawing.documents`.
"""
