"""Documents that come as bytes, as images of their pages: PDFs are drawn, TIFFs split.

Drawing happens in a process of its own, one page after another; drawn pages are kept for the chat's next
turns, which send the document again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections import OrderedDict
from pathlib import Path

from preprocess.formats.tiff import is_tiff, page_offsets
from preprocess.formats.tiff_page import page_file
from preprocess.limits import ImageLimits
from preprocess.pages import PageLimits, is_pdf
from vlm.requests.page_range import ALL, PageRange
from workers.local.page_drawing import PageRenderer

_KEPT_BYTES = 64 << 20


class DocumentPages:
    """Used from one event loop."""

    def __init__(self, limits: ImageLimits, page_limits: PageLimits | None = None) -> None:
        self._limits = limits
        self._renderer = PageRenderer(page_limits)
        self._drawn: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._kept_bytes = 0

    async def split(self, data: bytes, pages: PageRange = ALL, *, most: int) -> list[bytes]:
        """The pages as image files: PNGs of a PDF, TIFFs of a TIFF, any other image itself.

        Raises ImageError: `too_many_images` for more than `most` pages, `image_page_not_found`, and what
        `PageRenderer` and `page_offsets` raise.
        """
        if is_pdf(data):
            return await self._pdf(data, pages, most)
        return await asyncio.to_thread(self._images, data, pages, most)

    def _images(self, data: bytes, pages: PageRange, most: int) -> list[bytes]:
        offsets = page_offsets(data, self._limits.max_pages) if is_tiff(data) else [0]
        chosen = pages.of(len(offsets), most)
        if len(offsets) == 1:
            return [data]
        return [page_file(data, offsets[index], self._limits.max_bytes) for index in chosen]

    async def _pdf(self, data: bytes, pages: PageRange, most: int) -> list[bytes]:
        digest = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
        if digest in self._counts:
            chosen = pages.of(self._counts[digest], most)
            if all((digest, index) in self._drawn for index in chosen):
                return [self._again(digest, index) for index in chosen]
        path = await asyncio.to_thread(_write, data)
        try:
            count = await self._renderer.count(path)
            drawn = []
            for index in pages.of(count, most):
                if (digest, index) not in self._drawn:
                    self._keep(digest, count, index, (await self._renderer.render(path, index)).png)
                drawn.append(self._again(digest, index))
            return drawn
        finally:
            await asyncio.to_thread(_remove, path)

    def _again(self, digest: str, index: int) -> bytes:
        self._drawn.move_to_end((digest, index))
        return self._drawn[digest, index]

    def _keep(self, digest: str, count: int, index: int, png: bytes) -> None:
        """The newest page is kept however large it is, so that whoever drew it finds it."""
        self._counts[digest] = count
        self._drawn[digest, index] = png
        self._kept_bytes += len(png)
        while self._kept_bytes > _KEPT_BYTES and len(self._drawn) > 1:
            (old, _), gone = self._drawn.popitem(last=False)
            self._kept_bytes -= len(gone)
            if all(kept != old for kept, _ in self._drawn):
                self._counts.pop(old, None)

    async def close(self) -> None:
        await self._renderer.close()


def _write(data: bytes) -> str:
    """For the drawing process, which opens files."""
    descriptor, path = tempfile.mkstemp(prefix="vlm-", suffix=".pdf")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    return path


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)
