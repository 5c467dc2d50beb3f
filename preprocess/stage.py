"""The preprocess stage: bytes and a spec in, tiles out; and the key under which tiles are kept."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from PIL import Image

from preprocess.cut import cut
from preprocess.decode import WHITE, decode_header
from preprocess.limits import ImageLimits
from preprocess.probe import open_header
from preprocess.tiling import tiling_from_json
from preprocess.types import Detail, Tiles, TilingRule, Variant

_KEY_VERSION = "tiles-1"
# how far below the first resize a JPEG's reduced size may be: 4000 pixels halve for a target of 2048
_DRAFT_FRACTION = 0.95


@dataclass(frozen=True, slots=True)
class PreprocessSpec:
    """All that shapes the pixels of an image's tiles, besides its bytes."""

    rule: TilingRule
    detail: Detail = "auto"
    variant: Variant = "fast"
    background: tuple[int, int, int] = WHITE
    resample: int = int(Image.Resampling.LANCZOS)

    def __post_init__(self) -> None:
        if self.detail not in get_args(Detail):
            raise ValueError(f"detail must be one of {', '.join(get_args(Detail))}")
        if self.variant not in get_args(Variant):
            raise ValueError(f"variant must be one of {', '.join(get_args(Variant))}")
        if self.resample not in list(Image.Resampling):
            raise ValueError("resample must be the number of a Pillow filter")
        if len(self.background) != 3 or not all(_is_int(v) and 0 <= v <= 255 for v in self.background):
            raise ValueError("background must be three integers from 0 to 255")

    def to_json(self) -> dict[str, object]:
        return {
            "rule": self.rule.to_json(),
            "detail": self.detail,
            "variant": self.variant,
            "background": list(self.background),
            "resample": self.resample,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> PreprocessSpec:
        """The inverse of `to_json`. Raises ValueError for missing, unknown and wrong values."""
        expected = {"rule", "detail", "variant", "background", "resample"}
        if set(raw) != expected:
            raise ValueError(f"a preprocess spec must have the keys {', '.join(sorted(expected))}")
        rule, background = raw["rule"], raw["background"]
        if not isinstance(rule, Mapping) or not isinstance(background, list):
            raise ValueError("rule must be an object and background a list")
        return cls(
            rule=tiling_from_json(rule),
            detail=raw["detail"],  # type: ignore[arg-type]
            variant=raw["variant"],  # type: ignore[arg-type]
            background=tuple(background),
            resample=raw["resample"],  # type: ignore[arg-type]
        )


def preprocess(data: bytes, spec: PreprocessSpec, limits: ImageLimits | None = None) -> Tiles:
    """Decodes, resizes and cuts. Raises ImageError as `decode` does."""
    header = open_header(data, limits or ImageLimits())
    plan = spec.rule.plan(header.width, header.height, spec.detail)
    min_size = None
    if spec.variant == "fast" and not plan.boxes:
        width, height = plan.steps[0]
        min_size = (math.ceil(width * _DRAFT_FRACTION), math.ceil(height * _DRAFT_FRACTION))
    image = decode_header(header, spec.background, min_size)
    return cut(image, plan, spec.resample, spec.variant)


def tiles_key(digest: str, spec: PreprocessSpec) -> str:
    """64 hex digits. Details that cut alike share a key.

    digest: `ImageInfo.sha256`.
    """
    fields = (
        _KEY_VERSION,
        digest,
        json.dumps(spec.rule.to_json(), sort_keys=True, separators=(",", ":")),
        "high" if spec.rule.cuts_finely(spec.detail) else "low",
        spec.variant,
        ",".join(map(str, spec.background)),
        str(spec.resample),
    )
    key = hashlib.sha256()
    for field in fields:
        encoded = field.encode()
        key.update(len(encoded).to_bytes(8, "big"))
        key.update(encoded)
    return key.hexdigest()


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
