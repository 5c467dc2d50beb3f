"""Messages between processes of unlike versions, as there are in every rolling upgrade.

Rules
- A field that is added has a default, so that an older writer may lack it.
- A reader drops the fields and kinds of message that it does not know, with a line in its log.
- A message says the version of its writer; one that says none is of the first. What the first version would
  choke on is only sent to readers that say they are newer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

MESSAGE_VERSION = 2
FIRST_VERSION = 1

_dropped: set[tuple[str, str]] = set()  # what the log has a line about; bounded by what writers know


def known_fields(kind: type, value: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the dataclass `kind` has."""
    known = _field_names(kind)
    if value.keys() <= known:
        return dict(value)
    for name in value.keys() - known:
        note_dropped("field", f"{kind.__name__}.{name}")
    return {name: value[name] for name in value.keys() & known}


@cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


def note_dropped(what: str, name: object) -> None:
    """One line in the log for each `what` of this name."""
    entry = what, str(name)[:100]
    if entry not in _dropped and len(_dropped) < 1000:
        _dropped.add(entry)
        log.warning("dropped a message's %s that this version does not know: %s", *entry)


def version_of(value: Mapping[str, Any]) -> int:
    version = value.get("version", FIRST_VERSION)
    return version if isinstance(version, int) else FIRST_VERSION
