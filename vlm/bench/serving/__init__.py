"""What `vlm bench serve` asks, and its parts that are runs of their own.

Front door: `vlm.bench.serve_bench`.
"""
