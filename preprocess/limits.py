"""What an image may cost before this service refuses it. Every cap is checked from the header."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from preprocess.types import ImageError, ImageInfo

BYTES_PER_PIXEL = 4  # of a decoded image in memory, whatever its mode


@dataclass(frozen=True, slots=True)
class ImageLimits:
    max_bytes: int = 32 * 1024 * 1024  # of one file
    max_pixels: int = 100_000_000  # of one image
    max_aspect_ratio: int = 200  # longer side over shorter side
    max_pages: int = 10_000  # of one TIFF
    max_request_pixels: int = 256_000_000  # of all the images of one request

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} must be a positive integer")

    def to_json(self) -> dict[str, object]:
        return dict(asdict(self))

    @classmethod
    def from_json(cls, raw: dict[str, object]) -> ImageLimits:
        """Raises ValueError for unknown keys and for values that aren't positive integers."""
        unknown = sorted(set(raw) - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"unknown image limit: {', '.join(unknown)}")
        return cls(**raw)  # type: ignore[arg-type]


def check_request(infos: Iterable[ImageInfo], limits: ImageLimits) -> None:
    """Raises ImageError `images_too_large` when a request's images have too many pixels in total."""
    if sum(info.width * info.height for info in infos) > limits.max_request_pixels:
        raise ImageError(
            "images_too_large",
            f"The images of this request have more than {limits.max_request_pixels} pixels in total.",
        )
