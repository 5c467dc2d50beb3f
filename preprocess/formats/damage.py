"""The error of a damaged file, whatever its parser raised."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from preprocess.types import ImageError


def invalid_image() -> ImageError:
    return ImageError("invalid_image", "The image is damaged or incomplete and cannot be decoded.")


@contextmanager
def damage_is_refused() -> Iterator[None]:
    """Whatever a parser of strangers' numbers raises becomes `invalid_image`: they overflow, recurse, index
    beyond the end. ImageError stays what it is, and MemoryError, which says nothing of the file."""
    try:
        yield
    except (ImageError, MemoryError):
        raise
    except Exception:
        raise invalid_image() from None


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Pillow warns of damaged metadata, which no operator needs to know."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(pillow_for_tiff\.)?PIL\.")
        yield
