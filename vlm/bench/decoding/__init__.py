"""Decoders beyond the default model's size, cut down to what a bench can hold.

Front doors: `vlm.bench.decode_bench` and `vlm.bench.engine_bench`.
"""
