"""Names of files as text: on most systems they are bytes, which may be no UTF-8 and hold line breaks."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, unquote_to_bytes

# control characters, line and paragraph separators, and what turns the direction of the text around it
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def as_text(name: str) -> str:
    """Text that can be encoded: bytes that are no UTF-8 show as \\xNN."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half a character that stands for no byte
        return name.encode("utf-8", "backslashreplace").decode()


def one_line(name: str) -> str:
    """`as_text` for a terminal or a heading: line breaks and control characters show as escapes."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), as_text(name))


def percent_encoded(name: str) -> str:
    """The name's bytes, in ASCII."""
    return quote(os.fsencode(name))


def percent_decoded(text: str) -> str:
    """What `percent_encoded` was made of."""
    return os.fsdecode(unquote_to_bytes(text))
