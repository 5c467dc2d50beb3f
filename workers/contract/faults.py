"""Codes of failures that are the service's own: what a client, a batch or a later run may try again."""

from __future__ import annotations

BUSY = frozenset(
    {
        "engine_unavailable",
        "preprocessing_overloaded",
        "preprocessing_timeout",
        "preprocessing_unavailable",
        "shutting_down",
    }
)
"""No request causes these, however often it meets them."""

TRANSIENT = BUSY | {"deadline_exceeded", "encode_timeout", "engine_died", "request_timeout"}
"""Worth another try; who meets them again and again may be their cause."""

OURS = frozenset({"encode_failed", "internal_error", "visual_tokens_mismatch"})
"""Neither the request's fault nor likely to pass."""

TIMED_OUT = ("request_timeout", "The request took longer than this server allows.")
ENCODING_FAILED = ("encode_failed", "The image could not be encoded.")
BAD_TILES = ("image_processing_failed", "The image could not be processed.")
UNREADABLE = ("engine_died", "The engine's answer was lost on its way. Please try again.")
"""(code, message) of failures that several processes give for the same reason."""
