"""The header probe: format, size and identity of an image, before a pixel is decoded.

Only the one parser that a file's first bytes ask for ever runs, so formats outside the accepted list reach
no native code. `Image.open` is not used: its bomb check warns through process-wide state, and this module has
its own cap.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from preprocess.formats.damage import damage_is_refused, invalid_image, quiet_pillow
from preprocess.formats.gif import read_gif
from preprocess.formats.header import HeaderReader, read_orientation
from preprocess.formats.jpeg import open_jpeg
from preprocess.formats.libtiff import open_tiff
from preprocess.formats.png import SIGNATURE, read_png
from preprocess.formats.tiff import is_tiff, page_offsets
from preprocess.formats.tiff_page import one_page
from preprocess.formats.webp import read_webp, webp_size
from preprocess.limits import ImageLimits
from preprocess.types import ImageError, ImageInfo

ACCEPTED_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP")

_OPENERS: dict[str, Callable[[io.BytesIO], Any]] = {
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "TIFF": open_tiff,
    "BMP": BmpImageFile,
}


@dataclass(frozen=True, slots=True)
class Header:
    """An image file opened but not decoded."""

    image: Any  # an `ImageFile` of PIL, or for TIFFs of the Pillow that `preprocess.formats.libtiff` names
    format: str
    orientation: int  # EXIF, 1 to 8, still to be applied to the pixels
    width: int  # after EXIF orientation
    height: int  # after EXIF orientation
    num_pages: int


def probe(data: bytes, limits: ImageLimits | None = None) -> ImageInfo:
    """Reads the header only, of a TIFF's first page.

    Raises ImageError: `empty_image`, `unsupported_image_format`, `invalid_image`, `image_too_large`,
    `unsupported_aspect_ratio`.
    """
    header = open_header(data, limits or ImageLimits())
    return ImageInfo(
        sha256=hashlib.sha256(data).hexdigest(),
        format=header.format,
        width=header.width,
        height=header.height,
        num_bytes=len(data),
        num_pages=header.num_pages,
    )


def open_header(data: bytes, limits: ImageLimits) -> Header:
    """Opens without decoding and applies every limit. Raises ImageError as `probe` does."""
    if not data:
        raise ImageError("empty_image", "The image is empty.")
    if len(data) > limits.max_bytes:
        raise ImageError("image_too_large", f"The image has more than {limits.max_bytes} bytes.")
    name = sniff(data)
    with damage_is_refused(), quiet_pillow():
        header = _open(name, data, limits)
    _check_size(header.width, header.height, limits)
    return header


def _open(name: str, data: bytes, limits: ImageLimits) -> Header:
    exif = b""
    offsets = _tiff_pages(data, limits) if name == "TIFF" else [0]
    if name == "JPEG":
        image, exif = open_jpeg(data)
    elif name == "PNG":
        data, exif = read_png(data)
        image = _read(name, data)
    elif name == "GIF":
        image = _read(name, read_gif(data))
    elif name == "WEBP":
        # Pillow allocates an animation's canvas when it opens the file
        _check_size(*webp_size(data), limits)
        data, exif = read_webp(data)
        image = _read(name, data)
    elif name == "TIFF":
        image = _read(name, one_page(data, offsets[0], limits.max_pixels))
    else:
        image = _read(name, data)
    width, height = image.size
    # of a TIFF Pillow turns the pixels itself and reports the turned size
    orientation = read_orientation(exif)
    if orientation >= 5:
        width, height = height, width
    return Header(image, name, orientation, width, height, len(offsets))


def _read(name: str, data: bytes) -> Any:
    reader = HeaderReader(data)
    image = _OPENERS[name](reader)
    reader.is_bounded = False
    return image


def _tiff_pages(data: bytes, limits: ImageLimits) -> list[int]:
    try:
        return page_offsets(data, limits.max_pages)
    except ImageError as error:
        if error.code == "too_many_pages":
            error = ImageError("image_too_large", f"The image has more than {limits.max_pages} pages.")
        raise error from None


_ACCEPTED = "Accepted formats: JPEG, PNG, WebP, GIF, TIFF, BMP."
NO_PDF = (
    "A PDF is not an image: send it in a content part of type file; `vlm ask` and `vlm caption` read PDFs "
    f"themselves. {_ACCEPTED}"
)
_PDF_WITHIN = 1024  # bytes, before which a PDF's own header may begin


def sniff(data: bytes) -> str:
    """The format that the first bytes announce. Raises ImageError `unsupported_image_format`."""
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == SIGNATURE:
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if is_tiff(data):
        return "TIFF"
    if data[:2] == b"BM":
        return "BMP"
    if b"%PDF-" in data[:_PDF_WITHIN]:
        raise ImageError("unsupported_image_format", NO_PDF)
    raise ImageError("unsupported_image_format", f"The image format is not supported. {_ACCEPTED}")


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
