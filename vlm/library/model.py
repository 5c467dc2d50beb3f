"""Questions to a model that runs in this process."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from llm.request import Delta, Failed, RequestError
from preprocess.types import ImageError
from vlm.library.answers import Answer, Ask, Cost, Image, VlmError
from vlm.pipeline import ChatMessage, ImageInput, Pipeline, PreparedRequest
from workers.contract.engine_client import EngineUnavailable
from workers.contract.streams import AnswerFailed


class AsyncModel:
    """A checkpoint, loaded at the first question or by `async with`.

    `model` and `options` are those of `vlm serve` and docs/settings.md ([engine]): a folder, a hub id or
    "default"; threads, weights, kv_cache_mb, ... Raises ConfigError for what can't be used; ask, stream,
    caption and cost raise `VlmError`.
    """

    def __init__(self, model: str = "default", **options: Any) -> None:
        from vlm.build import build_local_pipeline
        from vlm.cli.options import engine_options

        self._pipeline: Pipeline = build_local_pipeline(engine_options(model, **options))
        self._starting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsyncModel:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._starting is not None:
            await self._pipeline.close()

    async def ask(self, images: Image | Sequence[Image], question: str, **settings: Any) -> Answer:
        """`settings`: system, detail, max_tokens, temperature, seed, schema."""
        return await self._answer(Ask.of(images, question, **settings))

    async def caption(self, image: Image, preset: str = "caption", **settings: Any) -> Answer:
        """`preset`: caption, text, summary or fields."""
        return await self._answer(Ask.of(image, None, preset=preset, **settings))

    async def stream(
        self, images: Image | Sequence[Image], question: str, **settings: Any
    ) -> AsyncIterator[str]:
        """Pieces of the answer as they are written."""
        prepared = self._prepare(Ask.of(images, question, **settings))
        await self._start()
        async with contextlib.aclosing(self._pipeline.run(prepared)) as events:
            async for event in events:
                if isinstance(event, Failed):
                    raise VlmError(event.code, event.message)
                if isinstance(event, Delta) and event.text:
                    yield event.text

    async def cost(self, images: Image | Sequence[Image], question: str = "", **settings: Any) -> Cost:
        """From the headers; nothing is decoded and no weights are needed."""
        ask = Ask.of(images, question or None, **settings)
        params = replace(ask.question.params, max_tokens=1)
        prepared = self._prepare(replace(ask, question=replace(ask.question, params=params)))
        prompt = prepared.prompt
        return Cost(
            prompt.num_tokens,
            prompt.num_image_tokens,
            sum(image.grid.num_tiles for image in prepared.images),
            self._pipeline.spec.kv_bytes(prompt.num_tokens + 1),
        )

    async def _start(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._pipeline.start())
        await asyncio.shield(self._starting)

    def _prepare(self, ask: Ask) -> PreparedRequest:
        images = [ImageInput(data, ask.detail) for data in ask.images]
        system = [] if ask.system is None else [ChatMessage("system", (ask.system,))]
        with _as_vlm_errors():
            return self._pipeline.prepare(
                f"ask-{uuid.uuid4().hex}",
                [*system, ChatMessage("user", (*images, ask.question.prompt))],
                ask.question.params,
            )

    async def _answer(self, ask: Ask) -> Answer:
        prepared = self._prepare(ask)
        await self._start()
        with _as_vlm_errors():
            whole = await self._pipeline.answer(prepared)
        usage = whole.usage
        return Answer(
            whole.text,
            whole.choices[0].finish_reason,
            usage.prompt_tokens,
            usage.image_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
        )


@contextlib.contextmanager
def _as_vlm_errors() -> Iterator[None]:
    try:
        yield
    except (ImageError, RequestError) as error:
        raise VlmError(error.code, error.message) from None
    except AnswerFailed as error:
        raise VlmError(error.failure.code, error.failure.message) from None
    except EngineUnavailable:
        raise VlmError("engine_unavailable", "The engine is not running.") from None
