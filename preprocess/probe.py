"""The header probe: format, size and identity of an image, before a pixel is decoded.

Only the one parser that a file's first bytes ask for ever runs, so formats outside the accepted list reach
no native code. `Image.open` is not used: its bomb check warns through process-wide state, and this module has
its own cap.
"""

from __future__ import annotations

import hashlib
import io
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from preprocess.header import HeaderReader, Jpeg, read_orientation
from preprocess.limits import ImageLimits
from preprocess.types import ImageError, ImageInfo

ACCEPTED_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")

_MAX_PNG_CHUNKS = 65_536
_OPENERS: dict[str, Callable[[io.BytesIO], ImageFile]] = {
    "JPEG": Jpeg,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "TIFF": TiffImageFile,
    "BMP": BmpImageFile,
}
_TIFF_MAGIC = {
    b"II*\x00": ("<", False),
    b"MM\x00*": (">", False),
    b"II+\x00": ("<", True),
    b"MM\x00+": (">", True),
}


@dataclass(frozen=True, slots=True)
class Header:
    """An image file opened but not decoded."""

    image: ImageFile
    format: str
    orientation: int  # EXIF, 1 to 8, still to be applied to the pixels
    width: int  # after EXIF orientation
    height: int  # after EXIF orientation
    num_pages: int


def probe(data: bytes, limits: ImageLimits | None = None, page: int = 0) -> ImageInfo:
    """Reads the header only.

    Raises ImageError: `empty_image`, `unsupported_image_format`, `invalid_image`, `image_too_large`,
    `unsupported_aspect_ratio`, `image_page_not_found`.
    """
    header = open_header(data, limits or ImageLimits(), page)
    digest = hashlib.sha256(data).hexdigest()
    return ImageInfo(
        sha256=page_digest(digest, page),
        format=header.format,
        width=header.width,
        height=header.height,
        num_bytes=len(data),
        num_pages=header.num_pages,
    )


def page_digest(digest: str, page: int) -> str:
    """The identity of one page of a file: the file's own digest for page 0."""
    if page == 0:
        return digest
    return hashlib.sha256(f"page:{page}:{digest}".encode()).hexdigest()


def open_header(data: bytes, limits: ImageLimits, page: int = 0) -> Header:
    """Opens without decoding and applies every limit. Raises ImageError as `probe` does."""
    if not data:
        raise ImageError("empty_image", "The image is empty.")
    if len(data) > limits.max_bytes:
        raise ImageError("image_too_large", f"The image has more than {limits.max_bytes} bytes.")
    name = sniff(data)
    if name == "WEBP":
        # Pillow allocates an animation's canvas when it opens the file
        _check_size(*_webp_size(data), limits)
    num_pages = _tiff_pages(data, limits) if name == "TIFF" else 1
    if not 0 <= page < num_pages:
        raise ImageError("image_page_not_found", "The image has no such page.")
    try:
        with quiet_pillow():
            reader = HeaderReader(data)
            image = _OPENERS[name](reader)
            reader.is_bounded = False
            if page:
                image.seek(page)
            width, height = image.size
    except MemoryError:
        raise
    except Exception:
        raise invalid_image() from None
    _check_size(width, height, limits)
    # Pillow turns TIFF pixels itself and reports the turned size
    orientation = 1 if name == "TIFF" else read_orientation(_exif(name, image, data) or b"")
    if orientation >= 5:
        width, height = height, width
    return Header(image, name, orientation, width, height, num_pages)


_ACCEPTED = "Accepted formats: JPEG, PNG, WebP, GIF, TIFF, BMP."
NO_PDF = f"A PDF is not an image: `vlm caption` reads PDFs, or send its pages as images. {_ACCEPTED}"
_PDF_WITHIN = 1024  # bytes, before which a PDF's own header may begin


def sniff(data: bytes) -> str:
    """The format that the first bytes announce. Raises ImageError `unsupported_image_format`."""
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:4] in _TIFF_MAGIC:
        return "TIFF"
    if data[:2] == b"BM":
        return "BMP"
    if b"%PDF-" in data[:_PDF_WITHIN]:
        raise ImageError("unsupported_image_format", NO_PDF)
    raise ImageError("unsupported_image_format", f"The image format is not supported. {_ACCEPTED}")


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Pillow warns of damaged metadata, which is no news to whoever runs a server."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")
        yield


def invalid_image() -> ImageError:
    return ImageError("invalid_image", "The image is damaged or incomplete and cannot be decoded.")


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    if width < 1 or height < 1:
        raise invalid_image()
    if width * height > limits.max_pixels:
        raise ImageError("image_too_large", f"The image has more than {limits.max_pixels} pixels.")
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise ImageError(
            "unsupported_aspect_ratio",
            f"The image's longer side is more than {limits.max_aspect_ratio} times its shorter side.",
        )


def _exif(name: str, image: ImageFile, data: bytes) -> bytes | None:
    if name == "PNG":
        return _png_exif(data)
    exif = image.info.get("exif")
    return exif if isinstance(exif, bytes) else None


def _png_exif(data: bytes) -> bytes | None:
    """The eXIf chunk, which may follow the pixels; Pillow would decode them to find it."""
    offset = 8
    for _ in range(_MAX_PNG_CHUNKS):
        if offset + 8 > len(data):
            return None
        length, kind = struct.unpack_from(">I4s", data, offset)
        if kind == b"eXIf":
            return data[offset + 8 : offset + 8 + length]
        offset += 12 + length
    return None


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk: https://developers.google.com/speed/webp/docs/riff_container."""
    kind = data[12:16]
    try:
        if kind == b"VP8X":
            return _u24(data, 24) + 1, _u24(data, 27) + 1
        if kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        if kind == b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & 0x3FFF, height & 0x3FFF
    except (struct.error, IndexError):
        pass
    raise invalid_image()


def _u24(data: bytes, offset: int) -> int:
    return data[offset] | data[offset + 1] << 8 | data[offset + 2] << 16


def _tiff_pages(data: bytes, limits: ImageLimits) -> int:
    """Walks the chain of directories (TIFF 6.0, section 2), which may be damaged or run in a circle."""
    order, big = _TIFF_MAGIC[data[:4]]
    offset_format, count_format, entry_bytes = ("Q", "Q", 20) if big else ("I", "H", 12)
    pages = 0
    seen: set[int] = set()
    try:
        (offset,) = struct.unpack_from(order + offset_format, data, 8 if big else 4)
        while offset and offset not in seen:
            seen.add(offset)
            (num_entries,) = struct.unpack_from(order + count_format, data, offset)
            pages += 1
            if pages > limits.max_pages:
                raise ImageError("image_too_large", f"The image has more than {limits.max_pages} pages.")
            next_offset = offset + struct.calcsize("=" + count_format) + num_entries * entry_bytes
            (offset,) = struct.unpack_from(order + offset_format, data, next_offset)
    except struct.error:
        if not pages:
            raise invalid_image() from None
    return pages
