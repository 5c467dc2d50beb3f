"""The header probe: users.md D1, D6, D11, and what a probe must never do."""

from __future__ import annotations

import hashlib
import io
import struct
import tracemalloc
import zlib

import pytest
from PIL import Image
from PIL.ImageFile import ImageFile

from preprocess.limits import ImageLimits, check_request
from preprocess.probe import ACCEPTED_FORMATS, probe
from preprocess.types import ImageError, ImageInfo


def encode(image: Image.Image, format_: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


def png(width: int, height: int, bit_depth: int, color_type: int, *chunks: tuple[bytes, bytes]) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bit_depth, color_type, 0, 0, 0)
    out = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", header), *chunks, (b"IEND", b"")):
        out += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return out


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def code_of(data: bytes, limits: ImageLimits | None = None) -> str:
    with pytest.raises(ImageError) as caught:
        probe(data, limits)
    return caught.value.code


@pytest.mark.parametrize("format_", ACCEPTED_FORMATS)
def test_every_accepted_format_gives_size_and_digest(format_: str) -> None:
    data = encode(Image.new("RGB", (31, 17), "red"), format_)
    info = probe(data)
    assert info == ImageInfo(hashlib.sha256(data).hexdigest(), format_, 31, 17, len(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_d1_size_is_that_of_the_upright_image(format_: str, orientation: int) -> None:
    data = encode(Image.new("RGB", (24, 16)), format_, exif=exif(orientation))
    info = probe(data)
    assert (info.width, info.height) == ((16, 24) if orientation >= 5 else (24, 16))


def test_orientation_after_the_pixels_of_a_png_is_found_without_decoding_them() -> None:
    pixels = zlib.compress((b"\0" + b"\0" * 24) * 16)
    data = png(24, 16, 8, 0, (b"IDAT", pixels), (b"eXIf", exif(6).removeprefix(b"Exif\0\0")))
    info = probe(data)
    assert (info.width, info.height) == (16, 24)


@pytest.mark.parametrize("block", [b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM", b"junk"])
def test_damaged_orientation_counts_as_upright(block: bytes) -> None:
    data = encode(Image.new("RGB", (24, 16)), "JPEG", exif=block)
    assert (probe(data).width, probe(data).height) == (24, 16)


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\0\0\0\x20ftypavif\0\0\0\0avifmif1",
        b"\0\0\0\x18ftypheic\0\0\0\0heicmif1",
        b"\0\0\1\0\1\0\x10\x10\0\0\1\0\x20\0",
        b"%PDF-1.7",
        b"P6 1 1 255\n\0\0\0",
        b"x",
    ],
    ids=["svg", "avif", "heic", "ico", "pdf", "ppm", "text"],
)
def test_d6_other_formats_are_refused_by_a_message_that_names_the_accepted_ones(data: bytes) -> None:
    with pytest.raises(ImageError) as caught:
        probe(data)
    assert caught.value.code == "unsupported_image_format"
    for name in ("JPEG", "PNG", "WebP", "GIF", "TIFF", "BMP"):
        assert name in caught.value.message


def test_d11_bomb_is_refused_from_the_header_with_flat_memory() -> None:
    side = 13_400
    row = b"\0" * (1 + (side + 7) // 8)
    compressor = zlib.compressobj(9)
    pixels = b"".join([compressor.compress(row) for _ in range(side)]) + compressor.flush()
    data = png(side, side, 1, 0, (b"IDAT", pixels))
    assert len(data) < 40_000
    tracemalloc.start()
    assert code_of(data) == "image_too_large"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_d11_cap_also_sums_over_the_images_of_a_request() -> None:
    info = ImageInfo("0" * 64, "PNG", 8_000, 8_000, 1)
    check_request([info] * 4, ImageLimits())
    with pytest.raises(ImageError) as caught:
        check_request([info] * 5, ImageLimits())
    assert caught.value.code == "images_too_large"


@pytest.mark.parametrize("kind", [b"VP8X", b"VP8L", b"VP8 "])
def test_huge_webp_is_refused_before_its_canvas_is_allocated(
    kind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {
        b"VP8X": bytes(4) + b"\xfe\x3f\0" * 2,
        b"VP8L": b"\x2f" + struct.pack("<I", 16_382 | 16_382 << 14),
        b"VP8 ": bytes(3) + b"\x9d\x01\x2a" + struct.pack("<HH", 16_383, 16_383),
    }[kind]
    data = (
        b"RIFF" + struct.pack("<I", 4 + 8 + len(body)) + b"WEBP" + kind + struct.pack("<I", len(body)) + body
    )
    monkeypatch.setattr("preprocess.probe._OPENERS", {})
    assert code_of(data) == "image_too_large"


def test_caps_on_bytes_pixels_and_shape() -> None:
    data = encode(Image.new("L", (100, 50)), "PNG")
    probe(data, ImageLimits(max_bytes=len(data), max_pixels=5_000, max_aspect_ratio=2))
    assert code_of(data, ImageLimits(max_bytes=len(data) - 1)) == "image_too_large"
    assert code_of(data, ImageLimits(max_pixels=4_999)) == "image_too_large"
    assert code_of(data, ImageLimits(max_aspect_ratio=1)) == "unsupported_aspect_ratio"
    assert code_of(encode(Image.new("1", (60_000, 1)), "PNG")) == "unsupported_aspect_ratio"


def test_empty_and_zero_sized_images_are_refused() -> None:
    assert code_of(b"") == "empty_image"
    assert code_of(png(0, 0, 8, 0, (b"IDAT", zlib.compress(b"")))) == "invalid_image"


@pytest.mark.parametrize("format_", ACCEPTED_FORMATS)
def test_damaged_header_is_one_typed_error_with_no_repr_in_it(format_: str) -> None:
    data = encode(Image.new("RGB", (64, 64)), format_)
    for length in (4, 9, 13, 17, 21, 25):
        with pytest.raises(ImageError) as caught:
            probe(data[:length])
        assert caught.value.code in ("invalid_image", "unsupported_image_format")
        assert "0x" not in caught.value.message and "<" not in caught.value.message


def test_probe_never_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [
        encode(Image.new("RGB", (24, 16)), name, exif=exif(6)) for name in ("JPEG", "PNG", "WEBP", "TIFF")
    ]
    monkeypatch.setattr(ImageFile, "load", lambda self: pytest.fail("decoded"))
    for data in images:
        assert probe(data).width == 16


def test_pages_of_a_tiff_are_counted_and_the_first_gives_its_size() -> None:
    first, second = Image.new("RGB", (10, 20)), Image.new("L", (30, 5))
    data = encode(first, "TIFF", save_all=True, append_images=[second])
    info = probe(data)
    assert (info.width, info.height, info.num_pages) == (10, 20, 2)
    assert info.sha256 == hashlib.sha256(data).hexdigest()
    assert code_of(data, ImageLimits(max_pages=1)) == "image_too_large"


def test_tiff_whose_pages_run_in_a_circle_ends() -> None:
    data = bytearray(encode(Image.new("L", (4, 4)), "TIFF"))
    (offset,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, offset)
    struct.pack_into("<I", data, offset + 2 + 12 * entries, offset)
    assert probe(bytes(data)).num_pages == 1


def test_limits_round_trip_and_refuse_unknown_keys() -> None:
    limits = ImageLimits(max_pixels=5)
    assert ImageLimits.from_json(limits.to_json()) == limits
    with pytest.raises(ValueError, match="max_pixel"):
        ImageLimits.from_json({"max_pixel": 5})
    with pytest.raises(ValueError, match="max_bytes"):
        ImageLimits(max_bytes=0)
