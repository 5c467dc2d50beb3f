"""Valid images of every format and compression, and what a seed damages of them.

`python tests/damaged_images.py FIRST COUNT` decodes damaged ones in one process and prints a line for each:
the seed, the file's name, and a digest of its pixels or the code of its error. Its memory is filled by
malloc(3) with a byte of the parent's choice (GLIBC_TUNABLES), so that pixels nobody wrote show in the digest;
before each, an image full of MARKER is decoded.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import random
import struct
import sys
import zlib
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
from PIL import Image, ImageDraw
from tiff_files import LONG, SHORT, Page, old_jpeg, strips, tiff_file

from preprocess.decode import decode
from preprocess.types import ImageError

MARKER = b"SECRET TEXT 4711 "
_MODES = ("1", "L", "P", "RGB", "RGBA", "CMYK", "LA", "I;16", "LAB")


def picture(mode: str = "RGB", width: int = 160, height: int = 112) -> Image.Image:
    """Lines and patches, of which every codec makes more than a few bytes."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    numbers = np.random.default_rng(0).integers(0, 200, (24, 7)).tolist()
    for x, y, dx, dy, *color in numbers:
        draw.line((x % width, y % height, dx % width, dy % height), tuple(color), 2)
    draw.rectangle((20, 20, 60, 50), "red")
    if mode == "I;16":
        return Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 257)
    if mode == "LAB":
        return Image.frombytes("LAB", image.size, image.tobytes())
    return image.convert(mode)


def encode(image: Image.Image, format_: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


@cache
def valid_images() -> dict[str, bytes]:
    found = {f"bmp {mode}": encode(picture(mode), "BMP") for mode in ("1", "P", "RGB")}
    found["bmp rle"] = run_length_bmp(picture("P"))
    found["gif"] = encode(picture("P"), "GIF")
    found["gif interlaced"] = encode(picture("L"), "GIF", interlace=1)
    found["gif part"] = partial_gif()
    found |= {f"jpeg {mode}": encode(picture(mode), "JPEG") for mode in ("L", "RGB", "CMYK")}
    found["jpeg progressive"] = encode(picture(), "JPEG", progressive=True)
    found["jpeg 444"] = encode(picture(), "JPEG", subsampling=0)
    found |= {f"png {mode}": encode(picture(mode), "PNG") for mode in ("1", "P", "RGB", "RGBA", "I;16")}
    found["png interlaced"] = interlaced_png(np.asarray(picture()))
    found["webp"] = encode(picture("RGBA"), "WEBP", quality=60)
    found["webp lossless"] = encode(picture("RGBA"), "WEBP", lossless=True)
    found["webp animated"] = encode(
        picture(), "WEBP", save_all=True, append_images=[Image.new("RGB", (160, 112))]
    )
    for compression in ("group3", "group4", "tiff_ccitt"):
        for strip_size in (500, 1 << 20):
            found[f"tiff {compression} {strip_size}"] = encode(
                picture("1"), "TIFF", compression=compression, strip_size=strip_size
            )
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"):
        for mode in _MODES:
            found[f"tiff {mode} {compression}"] = encode(picture(mode), "TIFF", compression=compression)
    for compression in ("tiff_lzw", "tiff_adobe_deflate"):
        found[f"tiff predictor {compression}"] = encode(
            picture(), "TIFF", compression=compression, tiffinfo={317: 2}, strip_size=2000
        )
    for mode in ("L", "RGB", "CMYK", "YCbCr"):
        found[f"tiff {mode} jpeg"] = encode(picture(mode), "TIFF", compression="jpeg")
    found["tiff big"] = encode(picture(), "TIFF", compression="tiff_lzw", big_tiff=True)
    found["tiff old jpeg"] = tiff_file(old_jpeg(picture(), whole=True))
    found["tiff old jpeg tables"] = tiff_file(old_jpeg(picture(), whole=False))
    for name, pack in (("raw", bytes), ("deflate", zlib.compress)):
        found[f"tiff tiles {name}"] = tiff_file(tiled(pack, 8 if pack is zlib.compress else 1))
    found["tiff planes"] = tiff_file(planes())
    found["tiff subsampled"] = tiff_file(subsampled())
    return found


def rgb_tags(compression: int, photometric: int = 2) -> dict[int, tuple[int, list[int]]]:
    return {
        256: (LONG, [160]),
        257: (LONG, [112]),
        258: (SHORT, [8, 8, 8]),
        259: (SHORT, [compression]),
        262: (SHORT, [photometric]),
        277: (SHORT, [3]),
    }


def tiled(pack: Callable[[bytes], bytes], compression: int) -> Page:
    pixels = np.pad(np.asarray(picture()), ((0, 16), (0, 32), (0, 0)))  # [128, 192, 3]
    tiles = [
        pack(pixels[y : y + 64, x : x + 64].tobytes()) for y in range(0, 128, 64) for x in range(0, 192, 64)
    ]
    counts = (LONG, [len(tile) for tile in tiles])
    sides = {322: (LONG, [64]), 323: (LONG, [64])}
    return Page({**rgb_tags(compression), **sides, 325: counts}, {324: tiles})


def planes() -> Page:
    pixels = np.asarray(picture())
    chunks = [zlib.compress(pixels[..., channel].tobytes()) for channel in range(3)]
    return strips({**rgb_tags(8), 278: (LONG, [112]), 284: (SHORT, [2])}, chunks)


def subsampled() -> Page:
    """YCbCr with half as many colours each way: blocks of four luminances and their two colours."""
    pixels = np.asarray(picture("YCbCr"))
    blocks = pixels.reshape(56, 2, 80, 2, 3).transpose(0, 2, 1, 3, 4).reshape(56, 80, 4, 3)
    units = np.concatenate([blocks[..., 0], blocks[:, :, 0, 1:]], axis=-1)  # [56, 80, 6]
    chunks = [zlib.compress(units[row : row + 14].tobytes()) for row in range(0, 56, 14)]
    return strips({**rgb_tags(8, 6), 278: (LONG, [28]), 530: (SHORT, [2, 2])}, chunks)


def run_length_bmp(image: Image.Image) -> bytes:
    """RLE8, with a gray palette."""
    rows = bytearray()
    for row in np.asarray(image)[::-1]:
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        for start, end in pairwise(starts):
            rows += bytes((end - start, row[start]))
        rows += b"\0\0"
    rows += b"\0\1"
    palette = b"".join(bytes((value, value, 255 - value, 0)) for value in range(256))
    start = 14 + 40 + len(palette)
    header = struct.pack("<IiiHHIIiiII", 40, *image.size, 1, 8, 1, len(rows), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(rows), 0, 0, start) + header + palette + rows


def partial_gif() -> bytes:
    """The frame covers a part of the canvas."""
    data = bytearray(encode(picture("P"), "GIF"))
    at = 13 + (3 * (2 << (data[10] & 7)) if data[10] & 0x80 else 0)
    assert data[at] == 0x2C
    struct.pack_into("<HH", data, 6, 200, 150)
    struct.pack_into("<HH", data, at + 1, 30, 20)
    return bytes(data)


def interlaced_png(pixels: np.ndarray) -> bytes:
    # x, y, and the steps of each
    passes = ["0088", "4088", "0448", "2044", "0224", "1022", "0112"]
    rows = bytearray()
    for x, y, dx, dy in (map(int, digits) for digits in passes):
        for row in pixels[y::dy, x::dx]:
            rows += b"\0" + row.tobytes()
    out = b"\x89PNG\r\n\x1a\n"
    for kind, body in (
        (b"IHDR", struct.pack(">IIBBBBB", *pixels.shape[1::-1], 8, 2, 0, 0, 1)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ):
        out += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return out


def damaged(seed: int) -> tuple[str, bytes]:
    """A name of `valid_images` and its bytes with some of them changed, or the end cut off."""
    names = list(valid_images())
    name = names[seed % len(names)]
    data = bytearray(valid_images()[name])
    draw = random.Random(seed)
    kind = draw.random()
    if kind < 0.15:
        del data[draw.randrange(20, len(data)) :]
    elif kind < 0.3:
        start = draw.randrange(len(data))
        count = draw.randrange(1, min(400, len(data) - start) + 1)
        data[start : start + count] = bytes([draw.choice((0, 255, draw.randrange(256)))]) * count
    else:
        for _ in range(draw.choice((1, 1, 2, 3, 8))):
            data[draw.randrange(len(data))] = draw.choice((0, 255, draw.randrange(256)))
    return name, bytes(data)


def outcome(data: bytes) -> str:
    """The pixels' digest, or the error's code."""
    try:
        return hashlib.sha256(decode(data).tobytes()).hexdigest()
    except ImageError as error:
        return error.code


def marked(width: int, height: int) -> bytes:
    """A PNG whose pixels spell MARKER."""
    return encode(Image.fromarray(np.resize(np.frombuffer(MARKER, np.uint8), (height, width))), "PNG")


def fresh_memory(size: int = 5000) -> bytes:
    """What malloc(3) gives out."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    place = libc.malloc(size)
    found = ctypes.string_at(place, size)
    libc.free(place)
    return found


def main() -> None:
    first, count = map(int, sys.argv[1:])
    print(fresh_memory().hex()[:2])
    warm = marked(400, 300)
    for seed in range(first, first + count):
        name, data = damaged(seed)
        decode(warm)
        print(seed, name, outcome(data), sep="\t")


if __name__ == "__main__":
    main()
