"""The one way from bytes to pixels: every image this service looks at passes `decode`.

Colour profiles are not applied, as the reference processors don't either. Animations give their first frame.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PIL import Image

from preprocess.colors import gray16_to_l, lab_to_rgb
from preprocess.formats.damage import damage_is_refused, invalid_image, quiet_pillow
from preprocess.formats.libtiff import load_tiff
from preprocess.limits import ImageLimits
from preprocess.probe import Header, open_header
from preprocess.types import ImageError

WHITE = (255, 255, 255)

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ALPHA_MODES = {"RGBA", "LA", "PA", "RGBa", "La"}
_PHOTOMETRIC_TAG = 262
_BITS_TAG = 258


def decode(
    data: bytes,
    limits: ImageLimits | None = None,
    *,
    background: tuple[int, int, int] = WHITE,
    min_size: tuple[int, int] | None = None,
) -> Image.Image:
    """An RGB image, upright, transparency composited on `background`.

    min_size: (width, height) of the upright image that the caller still needs. A JPEG may then come out 2, 4
    or 8 times smaller than it is, never below min_size; everything else comes out at its full size.
    Raises ImageError as `probe` does, `invalid_image` for a damaged file, and `unsupported_pixel_format`.
    """
    return decode_header(open_header(data, limits or ImageLimits()), background, min_size)


def decode_header(
    header: Header, background: tuple[int, int, int] = WHITE, min_size: tuple[int, int] | None = None
) -> Image.Image:
    """`decode` for a file that is open already; the header can't be used again."""
    image = header.image
    turned = header.orientation >= 5
    with damage_is_refused(), quiet_pillow():
        if header.format == "JPEG" and min_size is not None:
            image.draft(None, min_size[::-1] if turned else min_size)
        full_size = image.size
        if header.format == "TIFF":
            rgb = _to_rgb(load_tiff(image), header.format, image.tag_v2, background)
        else:
            image.load()
            rgb = _to_rgb(image, header.format, {}, background)
        if image.size != full_size:
            raise invalid_image()
        method = _TRANSPOSE.get(header.orientation)
        return rgb.transpose(method) if method is not None else rgb


def _to_rgb(
    image: Image.Image, name: str, tags: Mapping[int, object], background: tuple[int, int, int]
) -> Image.Image:
    """tags: of a TIFF."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and name == "PNG"):
        return _gray16_to_rgb(image, tags, background)
    if image.mode == "F":
        return _float_to_rgb(image, tags)
    if image.mode == "I":
        raise _unsupported_pixels()
    if image.mode == "LAB":
        return lab_to_rgb(image)
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        return _composite(_with_alpha(image), background)
    try:
        return image.convert("RGB")
    except ValueError:
        raise _unsupported_pixels() from None


def _with_alpha(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        image = image.convert("LA")
    return image.convert("RGBA")


def _composite(rgba: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    alpha = rgba.getchannel("A")
    if alpha.getextrema() == (255, 255):
        return rgba.convert("RGB")
    canvas = Image.new("RGB", rgba.size, background)
    canvas.paste(rgba.convert("RGB"), mask=alpha)
    return canvas


def _gray16_to_rgb(
    image: Image.Image, tags: Mapping[int, object], background: tuple[int, int, int]
) -> Image.Image:
    """0 to 65535 (0 to 4095 in a 12-bit TIFF) to 0 to 255; Pillow's own conversions clip or don't scale."""
    max_value = 4095 if tags.get(_BITS_TAG) == (12,) else 65535
    gray = gray16_to_l(image, max_value, white_is_zero=tags.get(_PHOTOMETRIC_TAG) == 0)
    transparency = image.info.get("transparency")
    if not isinstance(transparency, int):
        return gray.convert("RGB")
    mask = Image.fromarray(np.asarray(image) != transparency)
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(gray.convert("RGB"), mask=mask)
    return canvas


def _float_to_rgb(image: Image.Image, tags: Mapping[int, object]) -> Image.Image:
    """A float image has no range of its own: [0, 1] is stretched, [0, 255] kept, anything else refused."""
    low, high = image.getextrema()
    if not (isinstance(low, float) and isinstance(high, float)) or not 0.0 <= low <= high <= 255.0:
        raise _unsupported_pixels()
    values = np.asarray(image, dtype=np.float32)
    if not np.isfinite(values).all():
        raise _unsupported_pixels()
    scaled = np.rint(values * (255.0 if high <= 1.0 else 1.0)).astype(np.uint8)
    if tags.get(_PHOTOMETRIC_TAG) == 0:
        scaled = 255 - scaled
    return Image.fromarray(scaled).convert("RGB")


def _unsupported_pixels() -> ImageError:
    return ImageError(
        "unsupported_pixel_format",
        "The image's pixel format is not supported. Use gray, palette, RGB or CMYK of 8 or 16 bits.",
    )
