"""Metadata decides over no pixel: what it says, how large it is, whether it is damaged."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from damaged_images import encode, picture
from tiff_files import LONG, SHORT, gray, tiff_file

from preprocess.decode import decode
from preprocess.formats.gif import MAX_BLOCKS
from preprocess.formats.jpeg import MAX_SEGMENTS
from preprocess.formats.png import MAX_METADATA_CHUNKS
from preprocess.formats.webp import MAX_CHUNKS
from preprocess.probe import probe
from preprocess.types import ImageError

TURNED_RIGHT = b"II*\0\x08\0\0\0\1\0" + struct.pack("<HHII", 0x0112, 3, 1, 6) + bytes(4)
LARGE = zlib.compress(bytes(3 << 20))  # unpacks above every cap of Pillow's


def chunk(kind: bytes, body: bytes, checksum: int | None = None) -> bytes:
    checksum = zlib.crc32(kind + body) if checksum is None else checksum
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def segment(marker: int, body: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


PNG_CHUNKS = {
    "text that unpacks large": chunk(b"zTXt", b"mxfile\0\0" + LARGE),
    "international text that unpacks large": chunk(b"iTXt", b"workflow\0\1\0\0\0" + LARGE),
    "profile that unpacks large": chunk(b"iCCP", b"p\0\0" + LARGE),
    "much text": chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000))) * 80,
    "text with a wrong checksum": chunk(b"tEXt", b"a\0b", 1),
    "profile of an unknown kind": chunk(b"iCCP", b"p\0\7"),
    "short gamma": chunk(b"gAMA", b""),
    "short resolution": chunk(b"pHYs", b"\0"),
    "transparency with a wrong checksum": chunk(b"tRNS", bytes(6), 1),
    "animation control of no frames": chunk(b"acTL", bytes(8)),
    "unknown": chunk(b"vpAg", b"\xff" * 9),
}
JPEG_SEGMENTS = {
    "short JFIF": segment(0xE0, b"JFIF"),
    "short Adobe": segment(0xEE, b"Adobe"),
    "Photoshop block cut": segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4"),
    "Photoshop block of a negative size": segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\xff\xff\xff\xff"),
    "profile without its number": segment(0xE2, b"ICC_PROFILE\0"),
    "index of pictures": segment(0xE2, b"MPF\0" + b"\xff" * 8),
    "EXIF that leads nowhere": segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\xff"),
}
WEBP_CHUNKS = {
    "EXIF longer than the file": b"EXIF" + struct.pack("<I", 9999) + b"II*\0",
    "profile cut": b"ICCP" + struct.pack("<I", 100) + b"a",
    "unknown": b"ABCD" + struct.pack("<I", 3) + b"abc\0",
}
GIF_BLOCKS = {
    "much comment": b"!\xfe" + (b"\xff" + b"a" * 255) * 40_000 + b"\0",
    "short control": b"!\xf9\x01\0\0",
    "short application data": b"!\xff\x0bNETSCAPE2.0\x01\x01\0",
    "unknown": b"!\x99\x02ab\0",
}
TIFF_TAGS = {
    "resolution as text": {282: (2, b"many\0"), 296: (SHORT, [3])},
    "description without an end": {270: (2, b"x")},
    "profile of numbers": {34675: (SHORT, [1, 2, 3])},
    "EXIF outside the file": {34665: (LONG, [0xFFFFFFF0])},
    "unknown": {65000: (LONG, list(range(500)))},
}


@pytest.mark.parametrize("name", PNG_CHUNKS)
@pytest.mark.parametrize("place", ["before the pixels", "after them"])
def test_chunks_of_a_png(name: str, place: str) -> None:
    data = encode(picture(), "PNG")
    at = 33 if place == "before the pixels" else len(data) - 12
    assert_same_pixels(data[:at] + PNG_CHUNKS[name] + data[at:], data)


@pytest.mark.parametrize("name", JPEG_SEGMENTS)
def test_segments_of_a_jpeg(name: str) -> None:
    data = encode(picture(), "JPEG")
    assert_same_pixels(before_the_picture(data, JPEG_SEGMENTS[name]), data)


@pytest.mark.parametrize("name", WEBP_CHUNKS)
def test_chunks_of_a_webp(name: str) -> None:
    data = encode(picture(), "WEBP", lossless=True)
    extended = b"VP8X" + struct.pack("<IB3x", 10, 0x2C) + bytes((159, 0, 0, 111, 0, 0))
    body = b"WEBP" + extended + data[12:] + WEBP_CHUNKS[name]
    assert_same_pixels(b"RIFF" + struct.pack("<I", len(body)) + body, data)


@pytest.mark.parametrize("name", GIF_BLOCKS)
def test_blocks_of_a_gif(name: str) -> None:
    image = picture("P")
    data = encode(image, "GIF", transparency=image.getpixel((0, 0)))
    at = 13 + 3 * (2 << (data[10] & 7))
    assert data[at : at + 2] == b"!\xf9"
    assert_same_pixels(data[:at] + GIF_BLOCKS[name] + data[at:], data)


@pytest.mark.parametrize("name", TIFF_TAGS)
def test_tags_of_a_tiff(name: str) -> None:
    assert_same_pixels(tiff_file(gray(9, 5, TIFF_TAGS[name])), tiff_file(gray(9, 5)))


def assert_same_pixels(data: bytes, plain: bytes) -> None:
    assert (probe(data).width, probe(data).height) == (probe(plain).width, probe(plain).height)
    assert np.array_equal(np.asarray(decode(data)), np.asarray(decode(plain)))


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_read_all_the_same(format_: str) -> None:
    data = encode(picture(), format_, exif=(b"Exif\0\0" if format_ == "JPEG" else b"") + TURNED_RIGHT)
    if format_ == "PNG":
        data = data[:33] + PNG_CHUNKS["text that unpacks large"] + data[33:]
    assert decode(data).size == (112, 160)


def test_orientation_with_a_wrong_checksum_is_none() -> None:
    data = encode(picture(), "PNG")
    data = data[:33] + chunk(b"eXIf", TURNED_RIGHT, 1) + data[33:]
    assert decode(data).size == (160, 112)


def before_the_picture(data: bytes, metadata: bytes) -> bytes:
    at = {b"\x89P": 33, b"\xff\xd8": 2, b"GI": 13 + 3 * (2 << (data[10] & 7))}[data[:2]]
    return data[:at] + metadata + data[at:]


@pytest.mark.parametrize(
    "data",
    [
        before_the_picture(encode(picture(), "PNG"), chunk(b"tEXt", b"a\0") * MAX_METADATA_CHUNKS * 2),
        before_the_picture(encode(picture(), "JPEG"), segment(0xFE, b"") * MAX_SEGMENTS),
        encode(picture(), "WEBP") + b"ABCD\0\0\0\0" * MAX_CHUNKS,
        before_the_picture(encode(picture("L"), "GIF"), b"!\xfe\1a\0" * MAX_BLOCKS),
    ],
    ids=["PNG", "JPEG", "WebP", "GIF"],
)
def test_endless_metadata_is_refused(data: bytes) -> None:
    assert refusal(data) == "invalid_image"


def test_two_frames_in_a_jpeg_are_refused_before_a_decoder_sees_them() -> None:
    """The one that Pillow sees would be another than libjpeg's."""
    small, large = (encode(picture(width=side), "JPEG") for side in (16, 800))
    frame = small[small.index(b"\xff\xc0") :][:19]
    for before in (frame, b"\xff\xf7"):
        assert refusal(before_the_picture(large, before)) == "invalid_image"


def refusal(data: bytes) -> str:
    with pytest.raises(ImageError) as caught:
        probe(data)
    return caught.value.code
