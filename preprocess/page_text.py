"""Whether a drawn page shows the text that it holds.

A font that is neither embedded nor installed draws nothing, and pdfium does not tell. So the characters of
the page's text layer are looked for in its picture.
"""

from __future__ import annotations

import ctypes
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np

_MOST_LOOKED_AT = 200  # characters of a page; of more, evenly spread ones
_INVISIBLE_MODES = frozenset((3, 7))  # PDF 32000-1, table 106: neither filled nor stroked
_INK_CONTRAST = 12  # of 255, between the darkest and the lightest pixel of a character's box
_SAME_COLOUR = 12  # of 255: text of its background's colour is meant not to be seen
_FEWEST_MISSING = 0.05  # of the characters looked at

Box = tuple[int, int, int, int]
"""Pixels of a picture: left, top, right, bottom."""


def text_is_missing(page: Any, picture: np.ndarray) -> bool:
    """Whether a good part of the page's visible letters and digits has left no ink.

    page: an open `pypdfium2.PdfPage`; picture: the whole page drawn, uint8 [height, width, 3].
    """
    text = page.get_textpage()
    try:
        shown = [_is_shown(text, index, box, picture) for index, box in _letters(text, page, picture)]
    finally:
        text.close()
    return shown.count(False) > _FEWEST_MISSING * len(shown)


def _letters(text: Any, page: Any, picture: np.ndarray) -> Iterator[tuple[int, Box]]:
    """(index, box) of letters and digits that stand within the picture."""
    import pypdfium2.raw as pdfium

    count = text.count_chars()
    height, width = picture.shape[:2]
    for index in range(0, count, max(1, -(-count // _MOST_LOOKED_AT))):
        code = pdfium.FPDFText_GetUnicode(text, index)
        if code > 0x10FFFF or unicodedata.category(chr(code))[0] not in "LN":
            continue
        if pdfium.FPDFText_IsGenerated(text, index) == 1:
            continue
        left, bottom, right, top = text.get_charbox(index, loose=True)
        corners = [_pixel(page, picture, x, y) for x, y in ((left, top), (right, bottom))]
        (x0, x1), (y0, y1) = (sorted(values) for values in zip(*corners, strict=True))
        if 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height:
            yield index, (x0, y0, x1, y1)


def _pixel(page: Any, picture: np.ndarray, x: float, y: float) -> tuple[int, int]:
    """A point of the page in its picture, the page's rotation and crop box included."""
    import pypdfium2.raw as pdfium

    height, width = picture.shape[:2]
    column, row = ctypes.c_int(), ctypes.c_int()
    pdfium.FPDF_PageToDevice(page, 0, 0, width, height, 0, x, y, column, row)
    return column.value, row.value


def _is_shown(text: Any, index: int, box: Box, picture: np.ndarray) -> bool:
    """Whether there is ink in the character's box, or nobody meant to put any there."""
    x0, y0, x1, y1 = box
    pixels = picture[y0:y1, x0:x1]
    if int(np.ptp(pixels, axis=(0, 1)).max()) >= _INK_CONTRAST:
        return True
    return _is_hidden(text, index, pixels[0, 0])


def _is_hidden(text: Any, index: int, background: np.ndarray) -> bool:
    import pypdfium2.raw as pdfium

    written = pdfium.FPDFText_GetTextObject(text, index)
    if written and pdfium.FPDFTextObj_GetTextRenderMode(written) in _INVISIBLE_MODES:
        return True
    red, green, blue, alpha = (ctypes.c_uint() for _ in range(4))
    if not pdfium.FPDFText_GetFillColor(text, index, red, green, blue, alpha):
        return False
    colour = np.array([red.value, green.value, blue.value])
    return alpha.value == 0 or bool(np.abs(colour - background.astype(int)).max() < _SAME_COLOUR)
