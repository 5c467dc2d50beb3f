"""What the serving side needs of an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from llm.request import Event, Request, VisualKey
from workers.contract.tiles_handle import TilesHandle

# (code, message) of the `Failed` that ends every open stream
ENGINE_DIED = ("engine_died", "The engine stopped while it worked on this request. Please try again.")
SHUTTING_DOWN = ("shutting_down", "The server is shutting down.")


class EngineUnavailable(Exception):
    """The engine is down or restarting; the same request may succeed later."""


class EngineRefused(ValueError):
    """The engine's settings can't work on this machine; the message names them."""


class EngineClient(Protocol):
    """One engine behind `submit(request) -> events`.

    A stream ends with the last `Finished` (the one with `usage`) or with `Failed`; an engine that dies
    ends every stream with `ENGINE_DIED`, one that is closed with `SHUTTING_DOWN`. Closing the iterator early
    cancels the request.
    """

    @property
    def ready(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def submit(self, request: Request) -> AsyncGenerator[Event, None]:
        """Raises `EngineUnavailable` while the engine is down and `RequestError` for what never fits."""
        ...

    async def put_tiles(self, key: VisualKey, tiles: TilesHandle) -> None:
        """For a `WantVisual` of this key. Raises TilesLost where they must be made anew.

        Returns once the engine has them: wishes uttered before have then been delivered.
        """
        ...

    async def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        """The tiles of this key can't be had: fails the requests that wait for them."""
        ...

    async def stats(self) -> dict[str, Any]: ...

    async def clear_cache(self) -> None:
        """Forgets cached visual tokens and prefixes that no live request holds."""
        ...
