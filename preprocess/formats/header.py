"""Headers that are read within bounds: of pieces, of bytes, and of what an EXIF block may cost."""

from __future__ import annotations

import io
import struct

MAX_READS = 16_384  # about three for each extension, chunk or tag
_SPARE_BYTES = 1 << 20

EXIF_PREFIX = b"Exif\0\0"
_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"II\0*": "<", b"MM*\0": ">"}
_ORIENTATION_TAG = 0x0112
_INTEGERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I"}  # TIFF 6.0's types


class HeaderReader(io.BytesIO):
    """A file in memory that refuses to be read on once a header took more than any real one does: reads or
    bytes (tags may all point at the same large value). `is_bounded` off: the pixels follow."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.is_bounded = True
        self._reads_left = MAX_READS
        self._bytes_left = len(data) + _SPARE_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises ValueError beyond a bound."""
        piece = super().read(size)
        if self.is_bounded:
            self._reads_left -= 1
            self._bytes_left -= len(piece)
            if min(self._reads_left, self._bytes_left) < 0:
                raise ValueError("the header is too long")
        return piece


def read_orientation(exif: bytes) -> int:
    """1 to 8, from the first directory alone; a block that can't be read means 1."""
    start = 0
    while exif.startswith(EXIF_PREFIX, start):
        start += len(EXIF_PREFIX)
    order = _ORDERS.get(exif[start : start + 4])
    found = 1
    if order is None:
        return found
    try:
        (offset,) = struct.unpack_from(order + "I", exif, start + 4)
        (num_tags,) = struct.unpack_from(order + "H", exif, start + offset)
        for at in range(start + offset + 2, start + offset + 2 + 12 * num_tags, 12):
            tag, kind, count, field = struct.unpack_from(order + "HHI4s", exif, at)
            if tag == _ORIENTATION_TAG and count == 1 and kind in _INTEGERS:
                (value,) = struct.unpack_from(order + _INTEGERS[kind], field)
                found = value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return found
