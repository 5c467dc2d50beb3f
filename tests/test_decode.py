"""The one decode function: users.md D1, D3, D4, D5, D7."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from preprocess.decode import decode
from preprocess.probe import probe
from preprocess.types import ImageError


def encode(image: Image.Image, format_: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


def gradient(width: int = 48, height: int = 32) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(
        np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (width + height)], -1).astype(
            np.uint8
        )
    )


def pixels(data: bytes, **options: object) -> np.ndarray:
    image = decode(data, **options)
    assert image.mode == "RGB"
    info = probe(data)
    assert image.size == (info.width, info.height)
    return np.asarray(image).astype(int)


def code_of(data: bytes) -> str:
    with pytest.raises(ImageError) as caught:
        decode(data)
    return caught.value.code


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def tiff(array: np.ndarray, photometric: int, bits: int, sample_format: int = 1) -> bytes:
    """A one-strip TIFF, little-endian, for the layouts that Pillow does not write."""
    height, width = array.shape[:2]
    channels = 1 if array.ndim == 2 else array.shape[2]
    body = array.tobytes()
    bits_at = 8 + len(body)
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, channels, bits if channels == 1 else bits_at),
        (259, 3, 1, 1),
        (262, 3, 1, photometric),
        (273, 4, 1, 8),
        (277, 3, 1, channels),
        (278, 4, 1, height),
        (279, 4, 1, len(body)),
        (339, 3, 1, sample_format),
    ]
    extra = struct.pack("<HHH", *(bits,) * 3)
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", bits_at + len(extra)) + body + extra + directory


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_d1_every_orientation_comes_out_upright(format_: str, orientation: int) -> None:
    lossless = {"WEBP": {"lossless": True}}.get(format_, {})
    data = encode(gradient(), format_, exif=exif(orientation), **lossless)
    with Image.open(io.BytesIO(encode(gradient(), "PNG", exif=exif(orientation)))) as same:
        expected = np.asarray(ImageOps.exif_transpose(same)).astype(int)
    tolerance = 12 if format_ == "JPEG" else 0
    assert np.abs(pixels(data) - expected).max() <= tolerance


def test_d1_jpeg_of_24_by_16_turned_right_is_16_by_24() -> None:
    assert decode(encode(Image.new("RGB", (24, 16)), "JPEG", exif=exif(6))).size == (16, 24)


def _transparent(mode: str) -> bytes:
    """Left half hidden red or dark, right half opaque."""
    rgba = Image.new("RGBA", (8, 4), (255, 0, 0, 0))
    rgba.paste((0, 0, 255, 255), (4, 0, 8, 4))
    if mode == "RGBA":
        return encode(rgba, "PNG")
    if mode == "LA":
        la = Image.new("LA", (8, 4), (0, 0))
        la.paste((29, 255), (4, 0, 8, 4))
        return encode(la, "PNG")
    if mode == "P":
        p = Image.new("P", (8, 4), 0)
        p.putpalette([255, 0, 0, 0, 0, 255])
        p.paste(1, (4, 0, 8, 4))
        return encode(p, "PNG", transparency=0)
    if mode == "GIF":
        p = Image.new("P", (8, 4), 0)
        p.putpalette([255, 0, 0, 0, 0, 255])
        p.paste(1, (4, 0, 8, 4))
        return encode(p, "GIF", transparency=0)
    if mode == "PA":
        pa = np.zeros((4, 8, 2), np.uint8)
        pa[:, 4:] = (1, 255)
        return _palette_alpha_tiff(pa)
    if mode == "RGB":
        return encode(rgba.convert("RGB"), "PNG", transparency=(255, 0, 0))
    if mode == "I;16":
        gray = np.zeros((4, 8), np.uint16)
        gray[:, 4:] = 29 * 257
        return encode(Image.fromarray(gray), "PNG", transparency=0)
    assert mode == "WEBP"
    return encode(rgba, "WEBP", lossless=True, exact=True)


def _palette_alpha_tiff(pa: np.ndarray) -> bytes:
    height, width = pa.shape[:2]
    body = pa.tobytes()
    colormap = np.zeros((3, 256), np.uint16)
    colormap[:, 0], colormap[:, 1] = (65535, 0, 0), (0, 0, 65535)
    map_at = 8 + len(body)
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, 2, 8 | 8 << 16),
        (259, 3, 1, 1),
        (262, 3, 1, 3),
        (273, 4, 1, 8),
        (277, 3, 1, 2),
        (278, 4, 1, height),
        (279, 4, 1, len(body)),
        (320, 3, 768, map_at),
        (338, 3, 1, 2),
    ]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", map_at + colormap.nbytes) + body + colormap.tobytes() + directory


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "PA", "RGB", "I;16", "GIF", "WEBP"])
def test_d3_transparency_is_composited_on_the_background(mode: str) -> None:
    data = _transparent(mode)
    opaque = (29, 29, 29) if mode in ("LA", "I;16") else (0, 0, 255)
    for background in ((255, 255, 255), (10, 20, 30)):
        seen = pixels(data, background=background)
        assert (seen[:, :4] == background).all()
        assert (seen[:, 4:] == opaque).all()


def test_d3_half_transparent_is_half_way() -> None:
    seen = pixels(encode(Image.new("RGBA", (2, 2), (0, 0, 0, 51)), "PNG"))
    assert (seen == 204).all()


def raw_png(rows: bytes, depth: int, colour: int, transparent: tuple[int, ...]) -> bytes:
    """Two by two pixels."""
    out = b"\x89PNG\r\n\x1a\n"
    for kind, body in (
        (b"IHDR", struct.pack(">IIBBBBB", 2, 2, depth, colour, 0, 0, 0)),
        (b"tRNS", struct.pack(f">{len(transparent)}H", *transparent)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ):
        out += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return out


def test_transparent_colour_of_a_16_bit_rgb_png_is_honoured() -> None:
    rows = (b"\0" + struct.pack(">6H", 0xFFFF, 0x1234, 0, 0, 0, 0xFFFF)) * 2
    seen = pixels(raw_png(rows, 16, 2, (0xFFFF, 0x1234, 0)))
    assert (seen[:, 0] == 255).all() and (seen[:, 1] == (0, 0, 255)).all()


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("spare_bits", [0, 0xFFFF])
def test_transparent_gray_of_a_png_is_honoured_at_every_depth(depth: int, spare_bits: int) -> None:
    """Only the lowest `depth` bits of what the file says count (PNG, section 11.3.2.1)."""
    top = (1 << depth) - 1
    for hidden, other in ((0, top), (top, 0), (top // 3, top)):
        if hidden == other:
            continue
        packed = (hidden << depth | other) << max(0, 8 - 2 * depth)
        row = b"\0" + packed.to_bytes(max(1, depth // 4), "big")
        data = raw_png(row * 2, depth, 0, (hidden | spare_bits & ~top,))
        seen = pixels(data, background=(10, 20, 30))
        assert (seen[:, 0] == (10, 20, 30)).all() and (seen[:, 1] == other * 255 // top).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "YCbCr", "HSV"])
def test_d4_ordinary_modes_come_out_as_rgb(mode: str) -> None:
    image = gradient().convert(mode)
    format_ = "JPEG" if mode == "YCbCr" else "PNG"
    source = image.convert("RGB") if mode in ("YCbCr", "HSV") else image
    tolerance = 12 if format_ == "JPEG" else 0
    expected = np.asarray(source.convert("RGB")).astype(int)
    assert np.abs(pixels(encode(source, format_)) - expected).max() <= tolerance


@pytest.mark.parametrize("format_", ["PNG", "TIFF"])
def test_d4_16_bit_gray_is_scaled_not_clipped(format_: str) -> None:
    values = np.array([[0, 128, 256, 257, 32768, 65279, 65535]], np.uint16).repeat(2, 0)
    seen = pixels(encode(Image.fromarray(values), format_))
    assert (seen[..., 0] == np.rint(values / 257)).all()
    assert (seen[..., 0] == seen[..., 2]).all()


def test_d4_16_bit_gray_tiff_big_endian_and_white_is_zero() -> None:
    values = np.array([[0, 1000, 65535]], np.uint16).repeat(2, 0)
    assert (pixels(tiff(values, photometric=0, bits=16))[..., 0] == 255 - np.rint(values / 257)).all()
    big = tiff(values, photometric=1, bits=16)
    assert (pixels(big)[..., 0] == np.rint(values / 257)).all()


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_d4_float_tiff_in_a_known_range_is_right(top: float) -> None:
    values = np.linspace(0, top, 12, dtype=np.float32).reshape(2, 6)
    seen = pixels(tiff(values, photometric=1, bits=32, sample_format=3))
    assert np.abs(seen[..., 0] - values * (255 / top)).max() <= 0.51


@pytest.mark.parametrize("values", [[-1.0, 0.5], [0.0, 3000.0], [0.0, float("nan")], [0.0, float("inf")]])
def test_d4_float_tiff_in_an_unknown_range_is_refused(values: list[float]) -> None:
    array = np.array([values], np.float32)
    assert code_of(tiff(array, photometric=1, bits=32, sample_format=3)) == "unsupported_pixel_format"


@pytest.mark.parametrize(("dtype", "bits"), [(np.int32, 32), (np.int16, 16)])
def test_d4_signed_integers_are_refused(dtype: type, bits: int) -> None:
    data = tiff(np.array([[-5, 5]], dtype), photometric=1, bits=bits, sample_format=2)
    assert code_of(data) == "unsupported_pixel_format"


def test_d4_lab_matches_known_colours() -> None:
    # L*a*b* (D50) of sRGB red, green, blue, white, black, mid gray
    lab = np.array(
        [[(54, 81, 70), (88, -79, 81), (30, 68, -112), (100, 0, 0), (0, 0, 0), (53, 0, 0)]], dtype=float
    )
    stored = np.stack([np.rint(lab[..., 0] * 2.55), lab[..., 1] % 256, lab[..., 2] % 256], -1).astype(
        np.uint8
    )
    seen = pixels(tiff(stored, photometric=8, bits=8))
    expected = [[(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (126, 126, 126)]]
    assert np.abs(seen - expected).max() <= 12


def test_d4_cmyk_jpeg_is_taken_as_inverted_with_and_without_adobes_marker() -> None:
    """As browsers and other libraries do, whatever the standard says of a file without the marker."""
    adobe = encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    start = adobe.index(b"\xff\xee")
    (length,) = struct.unpack_from(">H", adobe, start + 2)
    for data in (adobe, adobe[:start] + adobe[start + 2 + length :]):
        assert np.abs(pixels(data) - (255, 0, 0)).max() <= 3


def test_d4_cmyk_tiff_is_right() -> None:
    assert (pixels(encode(Image.new("CMYK", (4, 4), (255, 0, 0, 0)), "TIFF")) == (0, 255, 255)).all()


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG"])
def test_d5_animation_gives_its_first_frame(format_: str) -> None:
    frames = [Image.new("RGB", (12, 8), color) for color in ("red", "green", "blue")]
    options: dict[str, object] = {"lossless": True} if format_ == "WEBP" else {}
    data = encode(frames[0], format_, save_all=True, append_images=frames[1:], **options)
    assert (pixels(data) == (255, 0, 0)).all()
    assert probe(data).num_pages == 1


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_d7_truncated_file_is_a_typed_error(format_: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    data = encode(Image.fromarray(noise), format_)
    for fraction in (0.3, 0.6, 0.9):
        assert code_of(data[: int(len(data) * fraction)]) == "invalid_image"


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"]), st.data())
def test_d8_damaged_bytes_give_pixels_or_a_fixed_text(format_: str, draw: st.DataObject) -> None:
    data = bytearray(encode(gradient(), format_))
    for _ in range(draw.draw(st.integers(1, 8))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    try:
        image = decode(bytes(data))
    except ImageError as error:
        assert "0x" not in error.message and "<" not in error.message and "Error" not in error.message
    else:
        assert image.mode == "RGB"


@pytest.mark.parametrize("orientation", [1, 6])
def test_draft_never_goes_below_what_is_asked_for(orientation: int) -> None:
    data = encode(gradient(800, 400), "JPEG", exif=exif(orientation))
    upright = (800, 400) if orientation == 1 else (400, 800)
    for divisor in (1, 2, 3, 7, 8):
        wanted = (upright[0] // divisor, upright[1] // divisor)
        got = decode(data, min_size=wanted).size
        assert got[0] >= wanted[0] and got[1] >= wanted[1]
        assert got == upright if divisor == 1 else got[0] < upright[0]
