"""The Pillow that reads TIFFs: one whose libtiff leaves no buffer unfilled.

libtiff before 4.7.2 calls a strip decoded whose data end early or are damaged, and its rest stays what that
memory held before: pixels of another image. pillow-simd is built on the system's libtiff; beside an old one
stands a Pillow with a libtiff of its own (packaging/pillow_for_tiff.py), which reads TIFFs and nothing else.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import threading
from functools import cache
from types import ModuleType
from typing import Any

from PIL import Image

from preprocess.formats.damage import invalid_image
from preprocess.formats.tiff import COMPRESSION, FAX_COMPRESSIONS, PHOTOMETRIC, WHITE_IS_ZERO
from preprocess.types import ImageError

_FIRST_CLEAN = (4, 7, 2)
_BESIDE = "pillow_for_tiff.PIL"

_OF_FAX_ROWS = (b"Premature EOF", b"%s at line")  # that end early, that are too short or too long

_ON_MESSAGE = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)  # who, what, details
_ON_OPEN = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def open_tiff(file: Any) -> Any:
    """A `TiffImageFile`. Raises ImageError where no libtiff is at hand that may decode it."""
    image = _module("TiffImagePlugin").TiffImageFile(file)
    if _uses_libtiff(image) and not is_clean():
        raise ImageError("unsupported_image_format", "Compressed TIFF images can't be read by this server.")
    return image


def load_tiff(image: Any) -> Image.Image:
    """The pixels as an image of PIL's, where they are.

    libtiff leaves rows zero that are missing or can't be decoded. Raises ImageError `invalid_image` for
    those, except in a fax page on which zero is white.
    """
    tags = image.tag_v2
    is_white = tags.get(COMPRESSION) in FAX_COMPRESSIONS and tags.get(PHOTOMETRIC) == WHITE_IS_ZERO
    complaints = _complaints() if _uses_libtiff(image) else _Complaints()
    complaints.rows_are_missing = False
    image.load()
    if complaints.rows_are_missing and not is_white:
        raise invalid_image()
    if isinstance(image, Image.Image):
        return image
    if image.mode in ("P", "PA"):  # the palette would stay behind
        image = image.convert("RGB" if image.mode == "P" else "RGBA")
    return Image.fromarrow(image, image.mode, image.size)


def prepare() -> None:
    """Loads what the first TIFF would load otherwise: before a process limits its memory."""
    _complaints()


def is_clean() -> bool:
    """Whether compressed TIFFs may be decoded."""
    return _version(_module("Image").core) >= _FIRST_CLEAN


def version_in_use() -> str:
    return ".".join(map(str, _version(_module("Image").core))) or "none"


def _version(core: Any) -> tuple[int, ...]:
    """Of the libtiff in a Pillow's `Image.core`; () where it has none."""
    found = re.search(r"(\d+)\.(\d+)\.(\d+)", getattr(core, "libtiff_version", None) or "")
    return tuple(map(int, found.groups())) if found else ()


@cache
def _package() -> str:
    """PIL itself if its libtiff is clean or no other is installed."""
    if _version(Image.core) >= _FIRST_CLEAN:
        return "PIL"
    try:
        core = _module("Image", _BESIDE).core
    except ImportError:
        return "PIL"
    core.set_use_block_allocator(1)  # an image in one piece can be handed over
    return _BESIDE


def _module(name: str, package: str | None = None) -> ModuleType:
    return importlib.import_module(f"{package or _package()}.{name}")


def _uses_libtiff(image: Any) -> bool:
    return any(tile[0] == "libtiff" for tile in image.tile)


class _Complaints(threading.local):
    """What libtiff says of the file that this thread decodes; it goes on after most of it."""

    rows_are_missing = False

    def on_error(self, _who: bytes, _what: bytes, _details: int) -> None:
        self.rows_are_missing = True

    def on_warning(self, _who: bytes, what: bytes, _details: int) -> None:
        if what.startswith(_OF_FAX_ROWS):
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
