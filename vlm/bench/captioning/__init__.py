"""Parts of `vlm bench caption`.

Front door: `vlm.bench.caption_bench`.
"""
