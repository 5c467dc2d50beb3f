"""The same without async: the work runs on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

from vlm.library.answers import Answer, Cost, Image
from vlm.library.client import AsyncClient
from vlm.library.model import AsyncModel

T = TypeVar("T")


class _Blocking:
    """Usable from several threads. Close it, or use it in a `with` statement."""

    def __init__(self, inner: AsyncClient | AsyncModel) -> None:
        self._inner = inner
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vlm", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs. May be called more than once."""
        if self._loop.is_closed():
            return
        self._wait(self._inner.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self, images: Image | Sequence[Image], question: str, **settings: Any) -> Answer:
        """`settings`: system, detail, max_tokens, temperature, seed, schema."""
        return self._wait(self._inner.ask(images, question, **settings))

    def caption(self, image: Image, preset: str = "caption", **settings: Any) -> Answer:
        """`preset`: caption, text, summary or fields."""
        return self._wait(self._inner.caption(image, preset, **settings))

    def cost(self, images: Image | Sequence[Image], question: str = "", **settings: Any) -> Cost:
        """From the headers; nothing is decoded."""
        return self._wait(self._inner.cost(images, question, **settings))

    def stream(self, images: Image | Sequence[Image], question: str, **settings: Any) -> Iterator[str]:
        """Pieces of the answer as they are written. Leaving the loop ends the work."""
        pieces = self._inner.stream(images, question, **settings)
        try:
            while True:
                piece = self._wait(_next(pieces))
                if piece is None:
                    return
                yield piece
        finally:
            self._wait(pieces.aclose())  # type: ignore[attr-defined]

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def _next(pieces: AsyncIterator[str]) -> str | None:
    return await anext(pieces, None)


class Client(_Blocking):
    """A server of this project at `url`; with `key` where it asks for one. See `AsyncClient`."""

    def __init__(
        self, url: str = "http://127.0.0.1:8000", key: str | None = None, *, timeout_s: float = 600.0
    ) -> None:
        super().__init__(AsyncClient(url, key, timeout_s=timeout_s))


class Model(_Blocking):
    """A checkpoint in this process, loaded at the first question. See `AsyncModel`."""

    def __init__(self, model: str = "default", **options: Any) -> None:
        super().__init__(AsyncModel(model, **options))
