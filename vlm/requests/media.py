"""Where an image of a message comes from. The only place that reads image URLs; it opens no files."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass

from preprocess.probe import NO_PDF
from vlm.requests.errors import invalid

IMAGE_ID = re.compile(r"img-[0-9a-f]{32}")
FILE_ID = re.compile(r"file-[0-9a-f]{32}")
_CHUNK = 1 << 20  # base64 characters between two moments at which other threads may run; a multiple of 4
_SPACES = re.compile(rb"[ \t\r\n]+")
_MAX_HEAD = 8192  # characters of a data: URI before its comma
_PLAIN_BYTES = ("application/octet-stream", "binary/octet-stream", "")  # the bytes tell what they are

RIGHT_SHAPE = (
    "An image is given as {'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,...'}}, "
    "or with the id of a stored image (img-...) as its url."
)


@dataclass(frozen=True, slots=True)
class Inline:
    """A data: URI whose base64 is still to be decoded."""

    base64: str


@dataclass(frozen=True, slots=True)
class Stored:
    image_id: str


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A file of /v1/files."""

    file_id: str


@dataclass(frozen=True, slots=True)
class Remote:
    url: str


Source = Inline | Stored | Uploaded | Remote


def parse_url(url: str, param: str, *, allow_urls: bool, is_document: bool = False) -> Source:
    """`is_document`: it may be a PDF. Raises ApiError 400, each way to be wrong with a code of its own."""
    if not url.strip():
        raise invalid("empty_image_url", f"The image's url is empty. {RIGHT_SHAPE}", param)
    scheme = url[:16].partition(":")[0].lower() if ":" in url[:16] else ""
    if scheme == "data":
        return Inline(_data_uri_payload(url, param, is_document))
    if IMAGE_ID.fullmatch(url):
        return Stored(url)
    if FILE_ID.fullmatch(url):
        return Uploaded(url)
    if url.startswith("file-"):
        raise invalid("invalid_file_id", "A file's id is file- and 32 hex digits.", param)
    if url.startswith("img-"):
        raise invalid("invalid_image_id", "A stored image's id is img- and 32 hex digits.", param)
    if scheme in ("http", "https"):
        if not allow_urls:
            raise invalid(
                "url_fetching_disabled",
                "This server does not fetch URLs. Send the image as a data: URI or upload it first.",
                param,
            )
        return Remote(url)
    if scheme and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:/", url[:20]):
        raise invalid("unsupported_url_scheme", f"This scheme is not supported. {RIGHT_SHAPE}", param)
    raise invalid("invalid_image_url", f"This is neither a URL nor a stored image's id. {RIGHT_SHAPE}", param)


def _data_uri_payload(url: str, param: str, is_document: bool) -> str:
    """RFC 2397: data:[<mediatype>][;base64],<data>."""
    comma = url.find(",", 5)
    if comma < 0:
        raise invalid("data_uri_without_comma", f"The data: URI has no comma. {RIGHT_SHAPE}", param)
    if comma > 5 + _MAX_HEAD:
        raise invalid(
            "data_uri_too_long",
            f"The data: URI has more than {_MAX_HEAD} characters before its comma. {RIGHT_SHAPE}",
            param,
        )
    head = url[5:comma]
    media_type, *attributes = (field.strip().lower() for field in head.split(";"))
    if "base64" not in attributes:
        raise invalid("data_uri_without_base64", f"The data: URI is not base64. {RIGHT_SHAPE}", param)
    if is_document and media_type == "application/pdf":
        return url[comma + 1 :]
    if media_type == "application/pdf":
        raise invalid("data_uri_media_type", NO_PDF, param)
    if not media_type.startswith("image/") and media_type not in _PLAIN_BYTES:
        raise invalid(
            "data_uri_media_type",
            "The data: URI's media type is not accepted: it is image/*, application/octet-stream, "
            f"binary/octet-stream or none. {RIGHT_SHAPE}",
            param,
        )
    return url[comma + 1 :]


def decode_base64(text: str, param: str) -> bytes:
    """Strict, but for line breaks and spaces. In pieces, so that other threads run meanwhile.

    Raises ApiError 400.
    """
    bad = invalid("invalid_base64", "The image's base64 can't be decoded.", param)
    try:
        data = text.encode("ascii")
    except UnicodeEncodeError:
        raise bad from None
    if any(space in data for space in (b"\n", b"\r", b" ", b"\t")):
        data = _SPACES.sub(b"", data)
    pieces: list[bytes] = []
    try:
        for start in range(0, len(data), _CHUNK):
            piece = data[start : start + _CHUNK]
            pieces.append(binascii.a2b_base64(piece, strict_mode=True))
            if piece.endswith(b"=") and start + _CHUNK < len(data):
                raise bad
    except (binascii.Error, ValueError):
        raise bad from None
    return b"".join(pieces)


def check_base64_size(text: str, max_bytes: int, param: str) -> None:
    """Before anything is decoded. Raises ApiError 400."""
    if len(text) * 3 // 4 > max_bytes + 1024:
        raise invalid("image_too_large", f"The image has more than {max_bytes} bytes.", param)
