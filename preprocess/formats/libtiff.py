"""The Pillow that reads TIFFs: one that clears the buffer which libtiff fills.

libtiff succeeds on strips whose data end early or are damaged, and leaves the rest of the buffer what that
memory held before: pixels of another image, in a Pillow before 13. pillow-simd is such a one, so beside it
stands a Pillow (packaging/pillow_for_tiff.py) that reads TIFFs and nothing else.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import PIL
from PIL import Image

from preprocess.formats.damage import invalid_image
from preprocess.formats.tiff import (
    COMPRESSION,
    FAX_COMPRESSIONS,
    ORIENTATION,
    PHOTOMETRIC,
    ROWS_PER_STRIP,
    WHITE_IS_ZERO,
)
from preprocess.types import ImageError

_FIRST_CLEAN = 13
_BESIDE = "pillow_for_tiff.PIL"
# of fax rows that end early, are too short or too long; of a JPEG
_MISSING_ROWS = (b"Premature EOF", b"%s at line", b"Improper JPEG strip/tile size")

_ON_MESSAGE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)  # who, what, details
_ON_OPEN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def open_tiff(file: Any) -> Any:
    """A `TiffImageFile`. Raises ImageError for a compressed file where no Pillow may decode it."""
    image = _module("TiffImagePlugin").TiffImageFile(file)
    if _uses_libtiff(image) and not is_clean():
        raise ImageError("unsupported_image_format", "Compressed TIFF images can't be read by this server.")
    return image


def load_tiff(image: Any) -> Image.Image:
    """The pixels as an image of PIL's, where they are.

    Raises ImageError `invalid_image` where rows are missing or can't be decoded; of a fax page in one strip
    they come out white.
    """
    tags = image.tag_v2
    is_one_strip = tags.get(ROWS_PER_STRIP, image.height) >= image.height
    is_upright = tags.get(ORIENTATION, 1) == 1  # Pillow forgets it
    complaints = _complaints() if _uses_libtiff(image) else _Complaints()
    complaints.rows_are_missing = False
    image.load()
    if complaints.rows_are_missing:
        if tags.get(COMPRESSION) not in FAX_COMPRESSIONS or not (is_one_strip and is_upright):
            raise invalid_image()
        if tags.get(PHOTOMETRIC) != WHITE_IS_ZERO:
            return _with_white_end(image)
    if isinstance(image, Image.Image):
        return image
    if image.mode in ("P", "PA"):  # the palette would stay behind
        image = image.convert("RGB" if image.mode == "P" else "RGBA")
    return Image.fromarrow(image, image.mode, image.size)


def _with_white_end(image: Any) -> Image.Image:
    """What is missing of a page was left zero, and zero is black in it."""
    pixels = np.array(image.convert("L"))
    num_rows = np.flatnonzero(pixels.any(axis=1)).max(initial=-1) + 1
    pixels[num_rows:] = 255
    return Image.fromarray(pixels)


def prepare() -> None:
    """Loads what the first TIFF would load otherwise: before a process limits its memory."""
    _complaints()


def is_clean() -> bool:
    """Whether compressed TIFFs may be decoded."""
    return _major(pillow_in_use()) >= _FIRST_CLEAN


def pillow_in_use() -> str:
    """The version of the Pillow that reads TIFFs."""
    return str(importlib.import_module(_package()).__version__)


def _major(version: str) -> int:
    return int(version.partition(".")[0])


@cache
def _package() -> str:
    """PIL itself if it is clean or no other is installed."""
    if _major(PIL.__version__) >= _FIRST_CLEAN:
        return "PIL"
    try:
        core = importlib.import_module(f"{_BESIDE}.Image").core
    except ImportError:
        return "PIL"
    core.set_use_block_allocator(1)  # an image in one piece can be handed over
    return _BESIDE


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{_package()}.{name}")


def _uses_libtiff(image: Any) -> bool:
    return any(tile[0] == "libtiff" for tile in image.tile)


class _Complaints(threading.local):
    """What libtiff says of the file that this thread decodes; it goes on after most of it."""

    rows_are_missing = False

    def on_error(self, _who: bytes, _what: bytes, _details: int) -> None:
        self.rows_are_missing = True

    def on_warning(self, _who: bytes, what: bytes, _details: int) -> None:
        if what.startswith(_MISSING_ROWS):
            self.rows_are_missing = True


@cache
def _complaints() -> _Complaints:
    """Listens to libtiff from now on, which would write to stderr otherwise. Pillow takes away the handler of
    warnings before it opens a file, so that each opening puts it back."""
    complaints = _Complaints()
    try:
        library = ctypes.CDLL(_module("Image").core.__file__)  # symbols of its dependencies are found too
        set_on_error, set_on_warning = library.TIFFSetErrorHandler, library.TIFFSetWarningHandler
        set_on_open = library.TIFFSetTagExtender
    except (OSError, AttributeError):  # a Pillow without libtiff, or that shows none of it
        return complaints
    on_error, on_warning = _ON_MESSAGE(complaints.on_error), _ON_MESSAGE(complaints.on_warning)
    on_open = _ON_OPEN(lambda _: set_on_warning(on_warning))
    _KEPT.extend((on_error, on_warning, on_open))
    set_on_error(on_error)
    set_on_open(on_open)
    return complaints


_KEPT: list[Any] = []  # what C code calls must not be collected
