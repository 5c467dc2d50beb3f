"""Pages of a PDF as PNG images, within caps on pages and pixels.

pdfium is native code: what a stranger sent is drawn in a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from preprocess.page_text import text_is_missing
from preprocess.types import ImageError

POINTS_PER_INCH = 72


@dataclass(frozen=True, slots=True)
class PageLimits:
    dpi: int = 150
    max_pixels: int = 16_000_000  # of one page: beyond it the page is drawn at fewer dpi
    max_pages: int = 5_000
    max_file_mb: int = 512
    page_cpu_s: int = 20
    page_deadline_s: float = 60.0  # wall time, also for opening the file
    memory_mb: int = 1_536  # address space of the process


def is_pdf(head: bytes) -> bool:
    """Readers accept a header within the first 1024 bytes (ISO 32000-1, annex H)."""
    return b"%PDF-" in head[:1024]


def page_scale(width_pt: float, height_pt: float, limits: PageLimits) -> float:
    """Pixels per point: the wanted dpi, or what `max_pixels` allows. Raises ImageError `invalid_page`."""
    if not (math.isfinite(width_pt) and math.isfinite(height_pt) and width_pt > 0 and height_pt > 0):
        raise ImageError("invalid_page", "The page has no drawable area.")
    scale = limits.dpi / POINTS_PER_INCH
    # pdfium rounds each side up to whole pixels
    while math.ceil(width_pt * scale) * math.ceil(height_pt * scale) > limits.max_pixels:
        scale *= 0.97
    return scale


@dataclass(frozen=True, slots=True)
class DrawnPage:
    """`lacks_text`: the page holds text that its picture does not show."""

    png: bytes
    lacks_text: bool = False


class PdfPages:
    """An open PDF. Raises ImageError `invalid_pdf`, `encrypted_pdf`, `too_many_pages`, and OSError."""

    def __init__(self, path: str, limits: PageLimits) -> None:
        import pypdfium2

        self._limits = limits
        self._document = pypdfium2.PdfDocument(_load(path))
        with contextlib.suppress(pypdfium2.PdfiumError):  # the pages without what was filled in
            self._document.init_forms()
        self.count = len(self._document)
        if self.count > limits.max_pages:
            self.close()
            raise ImageError("too_many_pages", f"The document has more than {limits.max_pages} pages.")
        if self.count < 1:
            self.close()
            raise ImageError("invalid_pdf", "The PDF has no pages.")

    def render(self, index: int) -> DrawnPage:
        """Page `index` (from 0) as a PNG, upright as the PDF says. Raises ImageError `invalid_page`."""
        import pypdfium2

        try:
            page = self._document[index]
        except (pypdfium2.PdfiumError, IndexError):
            raise ImageError("invalid_page", "The page is damaged and cannot be drawn.") from None
        try:
            width_pt, height_pt = page.get_size()
            scale = page_scale(width_pt, height_pt, self._limits)
            image = page.render(scale=scale, rev_byteorder=True).to_pil().convert("RGB")
            lacks_text = text_is_missing(page, np.asarray(image))
        except (pypdfium2.PdfiumError, ValueError):
            raise ImageError("invalid_page", "The page is damaged and cannot be drawn.") from None
        finally:
            page.close()
        png = io.BytesIO()
        image.save(png, "PNG", compress_level=1)
        return DrawnPage(png.getvalue(), lacks_text)

    def close(self) -> None:
        self._document.close()


def _load(path: str) -> Any:
    """pdfium's own handle. What went wrong is asked for right after a call that failed: pdfium keeps the last
    error, of whichever file it was. Raises ImageError `invalid_pdf`, `encrypted_pdf`, and OSError."""
    import pypdfium2.raw as pdfium

    os.stat(path)  # pdfium does not tell a file that is not there from one that is damaged
    document = pdfium.FPDF_LoadDocument(os.fsencode(path) + b"\0", None)
    if document:
        return document
    match pdfium.FPDF_GetLastError():
        case pdfium.FPDF_ERR_PASSWORD:
            raise ImageError("encrypted_pdf", "The PDF needs a password.")
        case pdfium.FPDF_ERR_SECURITY:
            raise ImageError("encrypted_pdf", "The PDF is encrypted in a way that is not supported.")
    raise ImageError("invalid_pdf", "The PDF is damaged and cannot be opened.")
