"""A run over all inputs: a feed that splits files into pages, and a window of pages under way.

The window keeps the engine's batch full and bounds memory: the feed reads on only when a page has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from llm.request import SamplingParams
from preprocess.types import ImageError
from vlm.caption.answers import Answerer
from vlm.caption.documents import Document, DocumentReader, UnreadableFile
from vlm.caption.inputs import Source
from vlm.caption.journal import Journal
from vlm.caption.presets import Question, length_prefixed_digest
from vlm.caption.rows import PageRef, Row, RowContext, error_row
from vlm.caption.stats import RunStats
from vlm.pipeline import ChatMessage
from vlm.requests.lines import BadLine, BatchLine, iterate_lines, parse_line, to_chat

BATCH_LINE_TOKENS = 512
"""max_tokens of a batch line that states none."""

LoadRequest = Callable[[], Awaitable[tuple[str, list[ChatMessage], SamplingParams]]]
"""(content digest, messages, params). Raises ImageError, BadLine, UnreadableFile."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    window: int = 24  # pages under way: what the engine decodes together, and some more
    bytes_under_way: int = 64 << 20
    retry_errors: bool = False  # try pages again that an earlier run could not read


class ByteBudget:
    """Bounds what loaded pages occupy; one that is too large by itself goes through alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._changed = asyncio.Condition()

    async def acquire(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._used or self._used + count <= self._limit)
            self._used += count

    async def release(self, count: int) -> None:
        async with self._changed:
            self._used -= count
            self._changed.notify_all()


class CaptionRun:
    def __init__(
        self,
        answerer: Answerer,
        journal: Journal,
        reader: DocumentReader,
        question: Question,
        context: RowContext,
        options: RunOptions | None = None,
    ) -> None:
        self._answerer = answerer
        self._journal = journal
        self._reader = reader
        self._question = question
        self._context = context
        self._line_context = RowContext(
            length_prefixed_digest("batch line"), "batch", context.model, context.model_revision
        )
        self._options = options or RunOptions()
        self._slots = asyncio.Semaphore(self._options.window)
        self._budget = ByteBudget(self._options.bytes_under_way)
        self._started: set[str] = set()  # row ids under way
        self._position = 0
        self.stats = RunStats()
        self.stopping = False

    @property
    def num_under_way(self) -> int:
        return len(self._started)

    def stop(self) -> None:
        """Takes no new pages; those under way are finished."""
        self.stopping = True

    async def run(self, sources: Iterator[Source]) -> RunStats:
        """Returns when every page has its durable row, or after `stop`. Raises OSError and `EngineGone`."""
        self.stats.started = time.monotonic()
        try:
            async with asyncio.TaskGroup() as pages:
                while not self.stopping:
                    source = await asyncio.to_thread(next, sources, None)
                    if source is None:
                        break
                    self._position += 1
                    if source.is_batch:
                        await self._feed_lines(pages, source.path)
                    else:
                        await self._feed_document(pages, source.path)
                    self.stats.sources_done += 1
        except BaseExceptionGroup as group:
            error = group.exceptions[0]
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        finally:
            await self._journal.flush()
        return self.stats

    async def _feed_document(self, pages: asyncio.TaskGroup, path: str) -> None:
        try:
            sha256 = await self._reader.identify(path)
            self._journal.saw_document(path, self._context.question, sha256, self._position)
            if self._keep_document(path, sha256):
                return
            document = await self._reader.open(path, sha256)
        except UnreadableFile as error:
            ref = PageRef(path, 0, 0, "")  # page 0: the file as a whole, which leaves its earlier rows alone
            await self._write_error(ref, self._context, "unreadable_file", error.message)
            return
        except ImageError as error:
            await self._write_error(PageRef(path, 1, 0, sha256), self._context, error.code, error.message)
            return
        for index in range(document.num_pages):
            ref = PageRef(path, index + 1, document.num_pages, sha256)
            await self._start(pages, ref, self._context, document.page_bytes, self._loader(document, index))
            if self.stopping:
                return

    def _loader(self, document: Document, index: int) -> LoadRequest:
        async def load() -> tuple[str, list[ChatMessage], SamplingParams]:
            image = await document.load(index)
            digest = await asyncio.to_thread(lambda: hashlib.sha256(image).hexdigest())
            return digest, self._question.messages(image), self._question.params

        return load

    async def _feed_lines(self, pages: asyncio.TaskGroup, path: str) -> None:
        try:
            lines = iterate_lines(path)
            number = 0
            while (line := await asyncio.to_thread(next, lines, None)) is not None and not self.stopping:
                number += 1
                await self._feed_line(pages, path, number, line)
        except OSError:
            await self._write_error(
                PageRef(path, 0, 0, ""), self._line_context, "unreadable_file", UnreadableFile.message
            )

    async def _feed_line(self, pages: asyncio.TaskGroup, path: str, number: int, line: bytes) -> None:
        digest = hashlib.sha256(line.strip()).hexdigest()
        try:
            parsed, body_digest = await asyncio.to_thread(_parse, line)
        except BadLine as error:
            ref = PageRef(path, number, 0, digest, error.custom_id)
            await self._write_error(ref, self._line_context, error.code, error.message)
            return

        async def load() -> tuple[str, list[ChatMessage], SamplingParams]:
            messages, params = await asyncio.to_thread(to_chat, parsed, default_max_tokens=BATCH_LINE_TOKENS)
            return body_digest, messages, params

        ref = PageRef(path, number, 0, digest, parsed.custom_id)
        await self._start(pages, ref, self._line_context, 2 * len(line), load)

    def _settled(self, ref: PageRef, context: RowContext) -> str | None:
        state = self._journal.settled(ref.slot(context.question), ref.row_id(context))
        return None if state == "error" and self._options.retry_errors else state

    def _keep_document(self, path: str, sha256: str) -> bool:
        """Whether all pages have their rows already; then the file isn't even split."""
        first = self._journal.row(PageRef(path, 1, 0, sha256).slot(self._context.question))
        if first is None or first["file_sha256"] != sha256:
            return False
        refs = [PageRef(path, page + 1, 0, sha256) for page in range(max(1, first["page_count"]))]
        states = [self._settled(ref, self._context) for ref in refs]
        if not all(states):
            return False
        for state in states:
            self.stats.keep(str(state))
        return True

    async def _start(
        self, pages: asyncio.TaskGroup, ref: PageRef, context: RowContext, num_bytes: int, load: LoadRequest
    ) -> None:
        """Waits for room, then starts the page; a page that has its row is left alone."""
        if state := self._settled(ref, context):
            self.stats.keep(state)
            return
        row_id = ref.row_id(context)
        if row_id in self._started:  # named twice
            return
        await self._slots.acquire()
        await self._budget.acquire(num_bytes)
        self._started.add(row_id)
        pages.create_task(self._page(ref, context, num_bytes, row_id, load))

    async def _page(
        self, ref: PageRef, context: RowContext, num_bytes: int, row_id: str, load: LoadRequest
    ) -> None:
        try:
            row = await self._row(ref, context, load)
            self.stats.add(row)
        finally:
            self._started.discard(row_id)
            await self._budget.release(num_bytes)
            self._slots.release()

    async def _row(self, ref: PageRef, context: RowContext, load: LoadRequest) -> Row:
        try:
            digest, messages, params = await load()
        except (ImageError, BadLine) as error:
            return await self._append(error_row(ref, context, error.code, error.message))
        except UnreadableFile as error:
            return await self._append(error_row(ref, context, "unreadable_file", error.message))
        return await self._answerer.write_row(ref, context, digest, messages, params)

    async def _append(self, row: Row) -> Row:
        await self._journal.append(row)
        return row

    async def _write_error(self, ref: PageRef, context: RowContext, code: str, message: str) -> None:
        if state := self._settled(ref, context):
            self.stats.keep(state)
        else:
            self.stats.add(await self._append(error_row(ref, context, code, message)))


def _parse(line: bytes) -> tuple[BatchLine, str]:
    """A line, and what equal work is recognised by: the body alone. Raises `BadLine`."""
    parsed = parse_line(line)
    return parsed, hashlib.sha256(json.dumps(parsed.body, sort_keys=True).encode()).hexdigest()
