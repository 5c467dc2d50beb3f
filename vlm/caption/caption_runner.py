"""A run over all inputs: a feed that splits files into pages, and a window of pages under way.

The window keeps the engine's batch full and bounds memory: the feed reads on only when a page has left.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from llm.request import SamplingParams
from vlm.caption.input_documents import (
    DocumentReader,
    InputDocument,
    Refusal,
    UnreadableFile,
    outcome,
    read_lines,
)
from vlm.caption.inputs import InputSource
from vlm.caption.journal import Journal
from vlm.caption.page_answers import PageAnswerer, PageWork
from vlm.caption.presets import PageQuestion, length_prefixed_digest
from vlm.caption.rows import PageRef, PageWarning, Row, RowContext, error_row
from vlm.caption.stats import RunStats
from vlm.pipeline import ChatMessage
from vlm.requests.lines import BatchLine, parse_line, to_chat

BATCH_LINE_TOKENS = 512
"""max_tokens of a batch line that states none."""


@dataclass(frozen=True, slots=True)
class LoadedPage:
    """`digest` is the content's: equal pages have equal ones."""

    digest: str
    messages: list[ChatMessage]
    params: SamplingParams
    warning: PageWarning | None = None


LoadRequest = Callable[[], Awaitable[LoadedPage]]
"""Raises ImageError, BadLine, UnreadableFile."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    window: int = 24  # pages under way: what the engine decodes together, and some more
    bytes_under_way: int = 64 << 20
    retry_errors: bool = False  # try pages again that an earlier run could not read


class Window:
    """Keeps the engine's batch full and bounds memory; a page too large by itself goes through alone."""

    def __init__(self, num_pages: int, num_bytes: int) -> None:
        self._num_pages = num_pages
        self._num_bytes = num_bytes
        self._pages = 0
        self._bytes = 0
        self._changed = asyncio.Condition()

    async def enter(self, num_bytes: int) -> None:
        """Returns when there is room for one more page of `num_bytes`."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_room(num_bytes))
            self._pages += 1
            self._bytes += num_bytes

    def _has_room(self, num_bytes: int) -> bool:
        fits = not self._bytes or self._bytes + num_bytes <= self._num_bytes
        return self._pages < self._num_pages and fits

    async def leave(self, num_bytes: int) -> None:
        async with self._changed:
            self._pages -= 1
            self._bytes -= num_bytes
            self._changed.notify_all()


class CaptionRun:
    def __init__(
        self,
        answerer: PageAnswerer,
        journal: Journal,
        reader: DocumentReader,
        question: PageQuestion,
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
        self._window = Window(self._options.window, self._options.bytes_under_way)
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

    async def run(self, sources: Iterator[InputSource]) -> RunStats:
        """Returns when every page has its durable row, or after `stop`.

        No file ends it: raises OSError of the output, `EngineGone` and what starting the engine raises.
        """
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
        except BaseExceptionGroup as group:
            error = group.exceptions[0]
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        finally:
            await self._journal.flush()
        return self.stats

    async def _feed_document(self, pages: asyncio.TaskGroup, path: str) -> None:
        sha256 = await outcome(path, self._reader.identify(path))
        if isinstance(sha256, Refusal):
            # page 0: the file as a whole, which leaves its earlier rows alone
            await self._write_refusal(PageRef(path, 0, 0, ""), self._context, sha256)
            self.stats.know(1)
            return
        if self._keep_document(path, sha256):
            self._saw(path, sha256)
            return
        document = await outcome(path, self._reader.open(path, sha256))
        if isinstance(document, Refusal) and document.code == UnreadableFile.code:
            await self._write_refusal(PageRef(path, 0, 0, ""), self._context, document)
            self.stats.know(1)
            return
        self._saw(path, sha256)
        if isinstance(document, Refusal):
            await self._write_refusal(PageRef(path, 1, 0, sha256), self._context, document)
            self.stats.know(1)
            return
        self.stats.know(document.num_pages)
        for index in range(document.num_pages):
            ref = PageRef(path, index + 1, document.num_pages, sha256)
            await self._start(pages, ref, self._context, document.page_bytes, self._loader(document, index))
            if self.stopping:
                return

    def _saw(self, path: str, sha256: str) -> None:
        """Rows of the document's earlier content are out of date from now on."""
        self._journal.saw_document(path, self._context.question, sha256, self._position)

    def _loader(self, document: InputDocument, index: int) -> LoadRequest:
        async def load() -> LoadedPage:
            page = await document.load(index)
            messages = self._question.messages(page.data)
            return LoadedPage(page.sha256, messages, self._question.params, page.warning)

        return load

    async def _feed_lines(self, pages: asyncio.TaskGroup, path: str) -> None:
        lines = read_lines(path)
        number = 0
        while not self.stopping:
            line = await outcome(path, asyncio.to_thread(next, lines, None))
            if line is None:
                break
            number += 1
            if isinstance(line, Refusal):
                await self._write_refusal(PageRef(path, 0, 0, ""), self._line_context, line)
                break
            await self._feed_line(pages, path, number, line)
        self.stats.know(number)

    async def _feed_line(self, pages: asyncio.TaskGroup, path: str, number: int, line: bytes) -> None:
        ref = PageRef(path, number, 0, hashlib.sha256(line.strip()).hexdigest())
        parsed = await outcome(f"{path}, line {number}", asyncio.to_thread(_parse, line))
        if isinstance(parsed, Refusal):
            ref = replace(ref, custom_id=parsed.custom_id)
            await self._write_refusal(ref, self._line_context, parsed)
            return
        request, body_digest = parsed

        async def load() -> LoadedPage:
            chat = await asyncio.to_thread(to_chat, request, default_max_tokens=BATCH_LINE_TOKENS)
            return LoadedPage(body_digest, *chat)

        ref = replace(ref, custom_id=request.custom_id)
        await self._start(pages, ref, self._line_context, 2 * len(line), load)

    def _settled(self, ref: PageRef, context: RowContext) -> str | None:
        state = self._journal.settled(ref.slot(context.question), ref.row_id(context))
        return None if state == "error" and self._options.retry_errors else state

    def _keep_document(self, path: str, sha256: str) -> bool:
        """Whether all pages have their rows already; then the file isn't even split."""
        first = self._journal.row(PageRef(path, 1, 0, sha256).slot(self._context.question))
        if first is None or first["file_sha256"] != sha256:
            return False
        states: Counter[str] = Counter()
        for page in range(max(1, first["page_count"])):
            state = self._settled(PageRef(path, page + 1, 0, sha256), self._context)
            if state is None:
                return False
            states[state] += 1
        for state in states.elements():
            self.stats.keep(state)
        self.stats.know(states.total())
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
            self.stats.pages_known -= 1
            return
        await self._window.enter(num_bytes)
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
            await self._window.leave(num_bytes)

    async def _row(self, ref: PageRef, context: RowContext, load: LoadRequest) -> Row:
        page = await outcome(f"{ref.path}, page {ref.page}", load())
        if isinstance(page, Refusal):
            return await self._append(error_row(ref, context, page.code, page.message))
        ref = replace(ref, warning=page.warning)
        return await self._answerer.write_row(PageWork(ref, context, page.digest, page.messages, page.params))

    async def _append(self, row: Row) -> Row:
        await self._journal.append(row)
        return row

    async def _write_refusal(self, ref: PageRef, context: RowContext, refusal: Refusal) -> None:
        if state := self._settled(ref, context):
            self.stats.keep(state)
        else:
            row = error_row(ref, context, refusal.code, refusal.message)
            self.stats.add(await self._append(row))


def _parse(line: bytes) -> tuple[BatchLine, str]:
    """A line, and what equal work is recognised by: the body alone. Raises `BadLine`."""
    parsed = parse_line(line)
    return parsed, hashlib.sha256(json.dumps(parsed.body, sort_keys=True).encode()).hexdigest()
