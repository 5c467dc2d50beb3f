"""Conversions that Pillow lacks or gets wrong, in strips so that memory stays near that of the image."""

from __future__ import annotations

import numpy as np
from PIL import Image

_STRIP_PIXELS = 1 << 20
# CIE L*a*b* (D50, as TIFF has it) -> XYZ -> linear sRGB, Bradford-adapted to D65
_D50 = np.array([0.96422, 1.0, 0.82521], dtype=np.float32)
_XYZ_TO_SRGB = np.array(
    [
        [3.1338561, -1.6168667, -0.4906146],
        [-0.9787684, 1.9161415, 0.0334540],
        [0.0719453, -0.2289914, 1.4052427],
    ],
    dtype=np.float32,
)


def gray16_to_l(image: Image.Image, max_value: int, white_is_zero: bool = False) -> Image.Image:
    """16-bit gray to 8 bits, rounded."""
    width, height = image.size
    out = np.empty((height, width), dtype=np.uint8)
    for top, bottom in _strips(width, height):
        values = np.asarray(image.crop((0, top, width, bottom))).astype(np.uint32)
        np.minimum(values, max_value, out=values)
        out[top:bottom] = (values * 255 + max_value // 2) // max_value
    return Image.fromarray(255 - out if white_is_zero else out)


def lab_to_rgb(image: Image.Image) -> Image.Image:
    """Mode LAB (L in 0..255 for 0..100, a and b signed bytes) to sRGB."""
    width, height = image.size
    out = np.empty((height, width, 3), dtype=np.uint8)
    for top, bottom in _strips(width, height):
        lab = np.asarray(image.crop((0, top, width, bottom)))  # [h, w, 3]
        a, b = (np.ascontiguousarray(lab[..., i]).view(np.int8).astype(np.float32) for i in (1, 2))
        fy = (lab[..., 0].astype(np.float32) * (100.0 / 255.0) + 16.0) / 116.0
        f = np.stack([fy + a / 500.0, fy, fy - b / 200.0], axis=-1)
        xyz = np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29)) * _D50
        linear = np.clip(xyz @ _XYZ_TO_SRGB.T, 0.0, 1.0)
        srgb = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
        out[top:bottom] = np.rint(srgb * 255.0).astype(np.uint8)
    return Image.fromarray(out)


def _strips(width: int, height: int) -> list[tuple[int, int]]:
    rows = max(1, _STRIP_PIXELS // width)
    return [(top, min(height, top + rows)) for top in range(0, height, rows)]
