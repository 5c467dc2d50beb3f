"""A JPEG's frame and orientation, without the application segments: they decide over no pixel.

Pillow reads the frame from here, libjpeg the whole file, and both must see the same one. So a marker that
libjpeg would not pass ends the walk. Source: ITU-T T.81, annex B.
"""

from __future__ import annotations

import io

from PIL.JpegImagePlugin import JpegImageFile

from preprocess.formats.header import EXIF_PREFIX

MAX_SEGMENTS = 8_192  # fill bytes and junk count too; an ICC or XMP block takes some hundred at most
MAX_EXIF_BLOCKS = 64

_FRAMES = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}  # baseline, extended, progressive; the last two arithmetic
_TABLES = {0xC4, 0xCC, 0xDB, 0xDC, 0xDD}
_METADATA = {*range(0xE0, 0xF0), 0xFE}
_RESTARTS = range(0xD0, 0xD8)  # without a length
_APP1, _SCAN = 0xE1, 0xDA


def open_jpeg(data: bytes) -> tuple[JpegImageFile, bytes]:
    """Pillow's image and the EXIF block. Raises ValueError or IndexError for a header that can't be read."""
    frames: list[bytes] = []
    exif: list[bytes] = []
    at = 2
    for _ in range(MAX_SEGMENTS):
        at = data.index(b"\xff", at) + 1
        marker = data[at]
        if marker == 0xFF:
            continue  # fill
        at += 1
        if marker == 0 or marker in _RESTARTS:
            continue
        end = at + max(2, int.from_bytes(data[at : at + 2], "big"))
        if end > len(data) or not (marker in _FRAMES or marker in _TABLES or marker in _METADATA | {_SCAN}):
            break
        if marker in _FRAMES or marker == _SCAN:
            frames.append(data[at - 2 : end])
        if marker == _APP1 and data.startswith(EXIF_PREFIX, at + 2):
            exif.append(data[at + 2 + (len(EXIF_PREFIX) if exif else 0) : end])
        if len(frames) > 2 or len(exif) > MAX_EXIF_BLOCKS:
            break
        if marker == _SCAN:
            image = JpegImageFile(io.BytesIO(b"\xff\xd8" + b"".join(frames)))
            image.fp = io.BytesIO(data)
            return image, b"".join(exif)
        at = end
    raise ValueError("no frame and scan")
