"""A file as pages: its kind, its identity, and a way to load each page's bytes when its turn comes."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from preprocess.formats.tiff import is_tiff, page_offsets
from preprocess.formats.tiff_page import page_file
from preprocess.limits import ImageLimits
from preprocess.pages import PageLimits, is_pdf
from preprocess.types import ImageError
from vlm.caption.rasterise import PageRenderer

_CHUNK = 1 << 20
_PDF_PAGE_BYTES = 4 << 20  # what a drawn page is taken to need until it is there

LoadPage = Callable[[int], Awaitable[bytes]]
"""Bytes of page `index` (from 0). Raises ImageError."""


@dataclass(frozen=True, slots=True)
class Document:
    """A readable file. `page_bytes` is about what a loaded page needs, for the memory budget."""

    file_sha256: str
    num_pages: int
    page_bytes: int
    load: LoadPage


class UnreadableFile(Exception):
    """The file can't be read now; nothing is known of its content."""

    message = "The file can't be read."


def _head(path: str) -> tuple[bytes, int]:
    with open(path, "rb") as file:
        return file.read(1024), os.fstat(file.fileno()).st_size


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _tiff_offsets(path: str, max_pages: int) -> list[int]:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return page_offsets(data, max_pages)


def _tiff_page(path: str, offset: int, max_bytes: int) -> bytes:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return page_file(data, offset, max_bytes)


@dataclass(frozen=True, slots=True)
class DocumentReader:
    """Opens files of every accepted kind; all reading happens on threads, all drawing in processes."""

    renderer: PageRenderer
    image_limits: ImageLimits
    page_limits: PageLimits

    async def identify(self, path: str) -> str:
        """The sha256 of a file's bytes. Raises `UnreadableFile`."""
        try:
            return await asyncio.to_thread(_sha256, path)
        except OSError:
            raise UnreadableFile from None

    async def open(self, path: str, file_sha256: str) -> Document:
        """Raises ImageError for a file that can't be split into pages, and `UnreadableFile`."""
        try:
            head, size = await asyncio.to_thread(_head, path)
            if is_pdf(head):
                return await self._open_pdf(path, file_sha256, size)
            if is_tiff(head):
                offsets = await asyncio.to_thread(_tiff_offsets, path, self.page_limits.max_pages)
                if len(offsets) > 1:
                    return self._open_tiff(path, file_sha256, size, offsets)
        except OSError:
            raise UnreadableFile from None
        if size > self.image_limits.max_bytes:
            raise ImageError(
                "image_too_large", f"The image has more than {self.image_limits.max_bytes} bytes."
            )
        return Document(file_sha256, 1, size, lambda index: _on_thread(_read, path))

    async def _open_pdf(self, path: str, file_sha256: str, size: int) -> Document:
        limit_mb = self.page_limits.max_file_mb
        if size > limit_mb << 20:
            raise ImageError("file_too_large", f"The PDF has more than {limit_mb} MiB.")
        num_pages = await self.renderer.count(path)
        return Document(
            file_sha256, num_pages, _PDF_PAGE_BYTES, lambda index: self.renderer.render(path, index)
        )

    def _open_tiff(self, path: str, file_sha256: str, size: int, offsets: list[int]) -> Document:
        max_bytes = self.image_limits.max_bytes

        async def load(index: int) -> bytes:
            return await _on_thread(_tiff_page, path, offsets[index], max_bytes)

        return Document(file_sha256, len(offsets), size // len(offsets) + 1, load)


async def _on_thread(function: Callable[..., bytes], *arguments: object) -> bytes:
    try:
        return await asyncio.to_thread(function, *arguments)
    except OSError:
        raise UnreadableFile from None
