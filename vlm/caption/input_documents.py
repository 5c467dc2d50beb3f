"""A file as pages: its kind, its identity, and a way to load each page's bytes when its turn comes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import TypeVar

from preprocess.formats.file_bytes import CHANGED, FileBytes
from preprocess.formats.tiff import is_tiff, page_offsets
from preprocess.formats.tiff_page import page_file
from preprocess.limits import ImageLimits
from preprocess.pages import PageLimits, is_pdf
from preprocess.probe import sniff
from preprocess.types import ImageError
from vlm.caption.rows import INTERNAL, PageWarning
from vlm.cli.file_names import one_line
from vlm.requests.lines import BadLine, iterate_lines
from workers.local.page_drawing import PageRenderer

_HEAD_BYTES, _CHUNK = 1024, 4 << 20
_PDF_PAGE_BYTES = 4 << 20  # what a drawn page is taken to need until it is there

log = logging.getLogger(__name__)

T = TypeVar("T")

TEXT_NOT_DRAWN = PageWarning(
    "text_not_drawn",
    "Some text of the page is missing from its picture: the PDF does not embed the fonts, and they are not "
    "installed.",
)


@dataclass(frozen=True, slots=True)
class PageImage:
    """A page's bytes, and what is to be known of them. Equal pages have equal hashes."""

    data: bytes
    sha256: str
    warning: PageWarning | None = None


LoadPage = Callable[[int], Awaitable[PageImage]]
"""Page `index` (from 0). Raises ImageError and `UnreadableFile`."""


@dataclass(frozen=True, slots=True)
class InputDocument:
    """A readable file. `page_bytes` is about what a loaded page needs, for the memory budget."""

    file_sha256: str
    num_pages: int
    page_bytes: int
    load: LoadPage


class UnreadableFile(Exception):
    """The file can't be read now; nothing is known of its content. `message` is a fixed text."""

    code = "unreadable_file"

    def __init__(self, reason: str) -> None:
        self.message = f"The file can't be read: {reason}."
        super().__init__(self.message)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is nothing to ask about; the message is a fixed text."""

    code: str
    message: str
    custom_id: str | None = None


async def outcome(where: str, making: Awaitable[T]) -> T | Refusal:
    """What is made of a file. Nothing that a file does ends a run: an unforeseen error is logged and its row
    says that the fault is ours."""
    try:
        return await making
    except (ImageError, BadLine, UnreadableFile) as error:
        return Refusal(error.code, error.message, getattr(error, "custom_id", None))
    except Exception:
        log.exception("%s", one_line(where))
        return Refusal(*INTERNAL)


@contextlib.contextmanager
def _reading(path: str) -> Iterator[BufferedReader]:
    """The file, opened. Raises `UnreadableFile`, also for an OSError while it is read."""
    try:
        # without waiting: a pipe's opening would last until somebody writes into it
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UnreadableFile("it is a folder, a pipe, a socket or a device")
            yield file
    except OSError as error:
        raise UnreadableFile((error.strerror or "the system does not say why").lower()) from None


def read_lines(path: str) -> Iterator[bytes]:
    """Of a batch file. Raises `UnreadableFile`."""
    with _reading(path):
        yield from iterate_lines(path)


def _look(path: str) -> tuple[bytes, int]:
    """(the first bytes, the size)"""
    with _reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(min(_HEAD_BYTES, size)) or b"", size


def _sha256(path: str, size: int, stopped: threading.Event) -> str:
    """Of the `size` bytes that a file had when it was looked at: some grow for ever, some hold none."""
    digest = hashlib.sha256()
    with _reading(path) as file:
        while size > 0 and not stopped.is_set() and (chunk := file.read(min(_CHUNK, size))):
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()


def _page(data: bytes, warning: PageWarning | None = None) -> PageImage:
    return PageImage(data, hashlib.sha256(data).hexdigest(), warning)


def _image(path: str, file_sha256: str, max_bytes: int) -> PageImage:
    with _reading(path) as file:
        data = file.read(max_bytes + 1) or b""
    page = _page(data)
    if page.sha256 != file_sha256:
        raise UnreadableFile(CHANGED)
    return page


@contextlib.contextmanager
def _bytes_of(path: str) -> Iterator[FileBytes]:
    """Raises `UnreadableFile`, also where a parser took it for damage."""
    with _reading(path) as file:
        data = FileBytes(file.fileno())
        try:
            yield data
        except ImageError:
            if data.fault is not None:
                raise data.fault from None
            raise


def _tiff_offsets(path: str, max_pages: int) -> list[int]:
    with _bytes_of(path) as data:
        return page_offsets(data, max_pages)


def _tiff_page(path: str, size: int, offset: int, max_bytes: int) -> PageImage:
    with _bytes_of(path) as data:
        if len(data) != size:
            raise UnreadableFile(CHANGED)
        return _page(page_file(data, offset, max_bytes))


def _check_format(path: str, head: bytes) -> None:
    """Raises ImageError for what is neither an image nor a PDF."""
    try:
        sniff(head)
    except ImageError as error:
        if not head:
            return  # told as an empty image
        if path.lower().endswith(".pdf"):
            raise ImageError("invalid_pdf", "The file is named .pdf but is not a PDF.") from None
        raise ImageError(error.code, f"{error.message} PDFs are read too.") from None


@dataclass(frozen=True, slots=True)
class DocumentReader:
    """Opens files of every accepted kind; all reading happens on threads, all drawing in processes."""

    renderer: PageRenderer
    image_limits: ImageLimits
    page_limits: PageLimits

    async def identify(self, path: str) -> str:
        """The sha256 of a file's bytes. Raises `UnreadableFile`, and ImageError `file_too_large`."""
        head, size = await asyncio.to_thread(_look, path)
        limit_mb = self.page_limits.max_file_mb
        if size > limit_mb << 20 and not is_tiff(head):
            raise ImageError("file_too_large", f"The file has more than {limit_mb} MiB.")
        stopped = threading.Event()
        try:
            return await asyncio.to_thread(_sha256, path, size, stopped)
        except asyncio.CancelledError:
            stopped.set()  # or the program would wait for the thread
            raise

    async def open(self, path: str, file_sha256: str) -> InputDocument:
        """Raises ImageError for a file that can't be split into pages, and `UnreadableFile`."""
        head, size = await asyncio.to_thread(_look, path)
        if is_pdf(head):
            return await self._open_pdf(path, file_sha256)
        _check_format(path, head)
        if is_tiff(head):
            offsets = await asyncio.to_thread(_tiff_offsets, path, self.page_limits.max_pages)
            if len(offsets) > 1:
                return self._open_tiff(path, file_sha256, size, offsets)
        max_bytes = self.image_limits.max_bytes
        if size > max_bytes:
            raise ImageError("image_too_large", f"The image has more than {max_bytes} bytes.")

        async def load(index: int) -> PageImage:
            return await asyncio.to_thread(_image, path, file_sha256, max_bytes)

        return InputDocument(file_sha256, 1, size, load)

    async def _open_pdf(self, path: str, file_sha256: str) -> InputDocument:
        num_pages = await self.renderer.count(path)

        async def load(index: int) -> PageImage:
            page = await self.renderer.render(path, index)
            return await asyncio.to_thread(_page, page.png, TEXT_NOT_DRAWN if page.lacks_text else None)

        return InputDocument(file_sha256, num_pages, _PDF_PAGE_BYTES, load)

    def _open_tiff(self, path: str, file_sha256: str, size: int, offsets: list[int]) -> InputDocument:
        max_bytes = self.image_limits.max_bytes

        async def load(index: int) -> PageImage:
            return await asyncio.to_thread(_tiff_page, path, size, offsets[index], max_bytes)

        return InputDocument(file_sha256, len(offsets), size // len(offsets) + 1, load)
