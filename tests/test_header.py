"""Headers made to cost more than a decode: D11 in processor time and memory instead of pixels."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from preprocess.formats.damage import quiet_pillow
from preprocess.formats.header import MAX_READS, read_orientation
from preprocess.formats.jpeg import MAX_EXIF_BLOCKS
from preprocess.limits import ImageLimits
from preprocess.probe import open_header
from preprocess.types import ImageError

LIMITS = ImageLimits()


def encoded(format: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6)).save(buffer, format)
    return buffer.getvalue()


def segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def jpeg(inserted: bytes) -> bytes:
    data = encoded("JPEG")
    return data[:2] + inserted + data[2:]


def chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(inserted: bytes) -> bytes:
    data = encoded("PNG")
    return data[:33] + inserted + data[33:]


def tags(entries: list[tuple[int, int, int, bytes]], order: str = "<") -> bytes:
    """A TIFF directory: (tag, type, count, four bytes)."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(entries))
    return head + b"".join(struct.pack(order + "HHI", *entry[:3]) + entry[3] for entry in entries) + bytes(4)


SMALL_EXIF = segment(0xE1, b"Exif\0\0" + tags([(0x0112, 3, 1, b"\6\0\0\0")]))
SHARED_VALUE = tags([(50_000 + i, 1, 1 << 20, struct.pack("<I", 8)) for i in range(100)]) + bytes(1 << 20)


@pytest.mark.parametrize(
    "data",
    [
        jpeg(segment(0xE1, b"") * MAX_READS),
        jpeg(segment(0xED, b"") * MAX_READS),
        jpeg(segment(0xFE, b"") * MAX_READS),
        jpeg(SMALL_EXIF * (MAX_EXIF_BLOCKS + 1)),
        jpeg(b"\xff" * MAX_READS),
        jpeg(b"\xff\0" * MAX_READS),
        png(chunk(b"abCd", b"") * MAX_READS),
        png(chunk(b"tEXt", b"a\0") * MAX_READS),
        SHARED_VALUE,
    ],
    ids=["app1", "app13", "comments", "exif", "fill", "junk", "chunks", "texts", "tags of one value"],
)
def test_a_header_of_endless_pieces_is_refused_before_it_costs_much(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ImageError) as caught:
            open_header(data, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.code == "invalid_image"


@pytest.mark.parametrize(
    "data",
    [
        jpeg(segment(0xE1, b"http://ns.adobe.com/xmp/extension/\0" + bytes(60_000)) * 200),
        jpeg(b"".join(segment(0xE2, b"ICC_PROFILE\0" + bytes((i, 255)) + bytes(99)) for i in range(1, 256))),
        jpeg(SMALL_EXIF * 2),
        jpeg(b"\xff" * 3000),
        png(chunk(b"tEXt", b"a\0b") * 500),
    ],
    ids=["extended xmp", "icc profile in 255 parts", "two exif blocks", "fill", "texts"],
)
def test_headers_as_long_as_real_ones_are_read(data: bytes) -> None:
    header = open_header(data, LIMITS)
    assert sorted((header.width, header.height)) == [6, 8]
    header.image.load()


def test_an_exif_block_is_not_read_for_its_other_tags() -> None:
    """Each could point at the same large value, of which a copy would be kept for each."""
    shared = [(100 + i, 1, 60_000, struct.pack("<I", 8)) for i in range(5000)]
    many = tags([*shared, (0x0112, 3, 1, b"\6\0\0\0")])
    data = jpeg(segment(0xE1, b"Exif\0\0" + many[:65_000]))
    tracemalloc.start()
    try:
        open_header(data, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    assert read_orientation(many) == 6


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([0x0112, 0x0112, 0x010F, 0x0113]),
        st.sampled_from([3, 3, 4, 8, 9]),
        st.sampled_from([1, 1, 1, 0]),
        st.sampled_from([b"\6\0\0\0", b"\0\0\0\6", b"\0\6\0\0", b"\x09\0\0\0", bytes(4), b"\xff" * 4]),
    ),
    max_size=4,
)


@given(ENTRIES, st.sampled_from("<>"), st.integers(0, 2), st.integers(0, 6))
def test_orientation_is_what_pillow_reads(
    entries: list[tuple[int, int, int, bytes]], order: str, num_prefixes: int, num_cut: int
) -> None:
    block = b"Exif\0\0" * num_prefixes + tags(entries, order)
    block = block[: len(block) - num_cut]
    reference = Image.Exif()
    with quiet_pillow():
        reference.load(block)
        value = reference.get(0x0112, 1)
    assert read_orientation(block) == (value if isinstance(value, int) and 1 <= value <= 8 else 1)


@given(st.binary(max_size=60))
def test_any_block_has_an_orientation(block: bytes) -> None:
    assert 1 <= read_orientation(block) <= 8
    assert 1 <= read_orientation(b"II*\0" + block) <= 8
