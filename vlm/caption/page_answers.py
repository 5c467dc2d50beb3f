"""One page's answer: equal pages once, transient faults tried again, everything else an error row."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from llm.request import Failed, Priority, RequestError, SamplingParams
from preprocess.types import ImageError
from vlm.caption.journal import Journal
from vlm.caption.remote_pages import RemotePages
from vlm.caption.rows import (
    INTERNAL,
    RETRIED_CODES,
    PageRef,
    Row,
    RowContext,
    duplicate_row,
    error_row,
    page_row,
    work_of,
)
from vlm.cli.file_names import one_line
from vlm.pipeline import ChatMessage, Pipeline
from vlm.remote.remote_server import ServerError
from workers.contract.engine_client import EngineUnavailable
from workers.contract.streams import AnswerFailed, WholeAnswer

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3


class EngineGone(Exception):
    """The engine stopped and did not come back."""


class Start:
    """What is started when it is first needed; other callers wait for the same start."""

    def __init__(self, start: Callable[[], Awaitable[None]]) -> None:
        self._start = start
        self._task: asyncio.Future[None] | None = None

    @property
    def is_done(self) -> bool:
        return self._task is not None and self._task.done()

    async def __call__(self) -> None:
        """Raises what the start raised."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._start())
        await asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Ends a start that is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            if not self._task.cancelled():
                self._task.exception()  # mark it as retrieved


async def ask_model(
    model: Pipeline | RemotePages,
    request_id: str,
    messages: Sequence[ChatMessage],
    params: SamplingParams,
    priority: Priority = "interactive",
) -> WholeAnswer:
    """Raises what preparing and answering raise."""
    if isinstance(model, RemotePages):
        return await model.answer(model.prepare(request_id, messages, params, priority=priority))
    return await model.answer(model.prepare(request_id, messages, params, priority=priority))


async def _started_already() -> None:
    return


@dataclass(frozen=True, slots=True)
class PageWork:
    """What to ask of the model for one page, and where its answer belongs."""

    ref: PageRef
    context: RowContext
    image_sha256: str  # of what is asked about: equal pages have equal ones
    messages: Sequence[ChatMessage]
    params: SamplingParams

    @property
    def identity(self) -> str:
        return work_of(self.image_sha256, self.context.question, self.context.model_revision)


class PageAnswerer:
    """Rows for pages; two pages of equal content wait for one answer. `start`: what answering needs."""

    def __init__(
        self,
        pipeline: Pipeline | RemotePages,
        journal: Journal,
        engine_wait_s: float = 120.0,
        start: Callable[[], Awaitable[None]] = _started_already,
    ) -> None:
        self._pipeline = pipeline
        self._journal = journal
        self._engine_wait_s = engine_wait_s
        self._start = start
        self._in_flight: dict[str, asyncio.Future[Row]] = {}
        self._alone = asyncio.Lock()

    async def write_row(self, work: PageWork) -> Row:
        """The page's row, durable on return. Raises OSError, `EngineGone` and what starting raises."""
        identity = work.identity
        original = self._journal.find_work(identity)
        if original is None and (leader := self._in_flight.get(identity)) is not None:
            original = await asyncio.shield(leader)
        if original is None:
            return await self._lead(identity, work)
        if "error" in original:
            row = error_row(work.ref, work.context, original["error"]["code"], original["error"]["message"])
        else:
            row = duplicate_row(work.ref, work.context, work.image_sha256, original)
        await self._journal.append(row)
        return row

    async def _lead(self, identity: str, work: PageWork) -> Row:
        future: asyncio.Future[Row] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark it as retrieved
        self._in_flight[identity] = future
        try:
            await self._start()
            row = await self._guarded(work)
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
            del self._in_flight[identity]

    async def _guarded(self, work: PageWork) -> Row:
        """An unforeseen error ends this page alone. Raises `EngineGone`."""
        try:
            return await self._generate(work)
        except EngineGone:
            raise
        except Exception:
            log.exception("%s, page %d", one_line(work.ref.path), work.ref.page)
            return error_row(work.ref, work.context, *INTERNAL)

    async def _generate(self, work: PageWork) -> Row:
        """Tries again one page at a time, so that a page that kills the engine takes no others with it."""
        result = await self._attempt(work)
        for _ in range(MAX_ATTEMPTS - 1):
            if not (isinstance(result, Failed) and result.code in RETRIED_CODES):
                break
            async with self._alone:
                await self._engine_back()
                result = await self._attempt(work)
        if isinstance(result, Failed):
            return error_row(work.ref, work.context, result.code, result.message)
        return page_row(
            work.ref,
            work.context,
            work.image_sha256,
            result.text.strip(),
            result.choices[0].finish_reason,
            result.usage,
            result.timings,
        )

    async def _attempt(self, work: PageWork) -> WholeAnswer | Failed:
        request_id = f"page-{uuid.uuid4().hex}"
        try:
            return await ask_model(self._pipeline, request_id, work.messages, work.params, "batch")
        except AnswerFailed as error:
            return error.failure
        except (ImageError, RequestError) as error:
            return Failed(request_id, error.code, error.message)
        except ServerError as error:
            raise EngineGone(error.message) from None
        except EngineUnavailable:
            return Failed(request_id, "engine_unavailable", "The engine was not available.")

    async def _engine_back(self) -> None:
        """Raises `EngineGone` when the engine stays down."""
        deadline = asyncio.get_running_loop().time() + self._engine_wait_s
        while not self._pipeline.engine.ready:
            if asyncio.get_running_loop().time() > deadline:
                raise EngineGone("the engine stopped and did not come back")
            await asyncio.sleep(0.1)
