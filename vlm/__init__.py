"""The product: composition, prompts, HTTP API, command line, captioning, planner, benchmarks, training.

Front doors: `from vlm import Client, Model` for users; for maintainers `vlm.pipeline` (read it first) and
`vlm.build` (the one composition root).
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm.library import Answer, AsyncClient, AsyncModel, Client, Cost, Model, VlmError

try:
    __version__ = version("vlm-serve")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

__all__ = ["Answer", "AsyncClient", "AsyncModel", "Client", "Cost", "Model", "VlmError", "__version__"]


def __getattr__(name: str) -> Any:
    """The library's names, imported when they are asked for: the command line needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vlm.library

    return getattr(vlm.library, name)
