"""Parts of `vlm bench serve` that are runs of their own.

Front door: `vlm.bench.serve_bench`.
"""
