"""The Python interface: questions to a running server (`Client`) or to a model in this process (`Model`).

Front door: `from vlm import Client, Model` (and `AsyncClient`, `AsyncModel`), see `docs/python.md`.
"""

from vlm.library.answers import Answer, Cost, VlmError
from vlm.library.blocking import Client, Model
from vlm.library.client import AsyncClient
from vlm.library.model import AsyncModel

__all__ = ["Answer", "AsyncClient", "AsyncModel", "Client", "Cost", "Model", "VlmError"]
