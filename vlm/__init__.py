"""The product: composition, prompts, HTTP API, command line, captioning, planner, benchmarks, training.

Front doors: `vlm.pipeline` (read it first) and `vlm.build` (the one composition root).
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vlm-serve")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
