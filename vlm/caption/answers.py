"""One page's answer: equal pages once, transient faults tried again, everything else an error row."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from llm.request import Delta, Failed, Finished, RequestError, SamplingParams
from preprocess.types import ImageError
from vlm.caption.journal import Journal
from vlm.caption.rows import (
    RETRIED_CODES,
    PageRef,
    Row,
    RowContext,
    duplicate_row,
    error_row,
    page_row,
    work_of,
)
from vlm.pipeline import ChatMessage, Pipeline
from workers.contract.engine_client import EngineUnavailable

MAX_ATTEMPTS = 3


class EngineGone(Exception):
    """The engine stopped and did not come back."""


class Answerer:
    """Rows for pages; two pages of equal content wait for one answer."""

    def __init__(self, pipeline: Pipeline, journal: Journal, engine_wait_s: float = 120.0) -> None:
        self._pipeline = pipeline
        self._journal = journal
        self._engine_wait_s = engine_wait_s
        self._in_flight: dict[str, asyncio.Future[Row]] = {}
        self._alone = asyncio.Lock()

    async def write_row(
        self,
        ref: PageRef,
        context: RowContext,
        image_sha256: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
    ) -> Row:
        """The page's row, which is durable on return. Raises OSError and `EngineGone`."""
        work = work_of(image_sha256, context.question, context.model_revision)
        original = self._journal.find_work(work)
        if original is None and (leader := self._in_flight.get(work)) is not None:
            original = await asyncio.shield(leader)
        if original is None:
            return await self._lead(work, ref, context, image_sha256, messages, params)
        if "error" in original:
            row = error_row(ref, context, original["error"]["code"], original["error"]["message"])
        else:
            row = duplicate_row(ref, context, image_sha256, original)
        await self._journal.append(row)
        return row

    async def _lead(
        self,
        work: str,
        ref: PageRef,
        context: RowContext,
        image_sha256: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
    ) -> Row:
        future: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # read, if by nobody else
        self._in_flight[work] = future
        try:
            row = await self._generate(ref, context, image_sha256, messages, params)
            await self._journal.append(row)
            future.set_result(row)
            return row
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
            raise
        finally:
            del self._in_flight[work]

    async def _generate(
        self,
        ref: PageRef,
        context: RowContext,
        image_sha256: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
    ) -> Row:
        """Tries again one page at a time, so that a page that kills the engine takes no others with it."""
        result = await self._attempt(messages, params)
        for _ in range(MAX_ATTEMPTS - 1):
            if not (isinstance(result, Failed) and result.code in RETRIED_CODES):
                break
            async with self._alone:
                await self._engine_back()
                result = await self._attempt(messages, params)
        if isinstance(result, Failed):
            return error_row(ref, context, result.code, result.message)
        text, finished = result
        assert finished.usage is not None and finished.timings is not None
        return page_row(
            ref, context, image_sha256, text.strip(), finished.reason, finished.usage, finished.timings
        )

    async def _attempt(
        self, messages: Sequence[ChatMessage], params: SamplingParams
    ) -> tuple[str, Finished] | Failed:
        request_id = f"page-{uuid.uuid4().hex}"
        texts: list[str] = []
        try:
            prepared = self._pipeline.prepare(request_id, messages, params, priority="batch")
            async for event in self._pipeline.run(prepared):
                match event:
                    case Delta(choice=0, text=text):
                        texts.append(text)
                    case Finished(usage=usage) if usage is not None:
                        return "".join(texts), event
                    case Failed():
                        return event
        except (ImageError, RequestError) as error:
            return Failed(request_id, error.code, error.message)
        except EngineUnavailable:
            pass
        return Failed(request_id, "engine_unavailable", "The engine was not available.")

    async def _engine_back(self) -> None:
        """Raises `EngineGone` when the engine stays down."""
        deadline = asyncio.get_running_loop().time() + self._engine_wait_s
        while not self._pipeline.engine.ready:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineGone("the engine stopped and did not come back")
            await asyncio.sleep(0.1)
