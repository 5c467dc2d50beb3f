"""What the benchmarks share: results, load clients, server processes, opponents, pages.

Front door: `vlm.bench.harness.results`.
"""
