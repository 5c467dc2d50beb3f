"""The product: composition, prompts, HTTP API, command line, captioning, planner, benchmarks, training.

Front doors: `vlm.pipeline` (read it first) and `vlm.build` (the one composition root).
"""
