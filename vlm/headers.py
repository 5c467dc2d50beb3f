"""Images by their headers, whatever a file holds."""

from __future__ import annotations

import logging

from preprocess.limits import ImageLimits
from preprocess.probe import invalid_image, probe
from preprocess.types import ImageError, ImageInfo

log = logging.getLogger(__name__)


def read_header(data: bytes, limits: ImageLimits | None = None) -> ImageInfo:
    """`probe`. An unforeseen exception of a parser is a damaged image as well, and logged.

    Raises ImageError.
    """
    try:
        return probe(data, limits)
    except (ImageError, MemoryError):
        raise
    except Exception:
        log.exception("an image's header ended its parser")
        raise invalid_image() from None
