"""Plans as readable tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def gigabytes(num_bytes: float) -> str:
    """Decimal units, as bandwidths have."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def binary(num_bytes: float) -> str:
    """Binary units, as per-token sizes have."""
    for size, unit in _BINARY:
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes:g} B"


def duration(seconds: float) -> str:
    if math.isinf(seconds):
        return "endless"
    if seconds < 1e-6:
        return "0 ms"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


def count(value: float) -> str:
    """A count: whole where it is large, three digits where it is small."""
    if math.isinf(value):
        return "endless"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percent(share: float) -> str:
    return f"{share * 100:.3g}%"


def pairs(title: str, rows: Sequence[tuple[str, str]], notes: Sequence[str] = ()) -> str:
    """A titled table of two columns and the assumptions under it."""
    width = max(len(label) for label, _ in rows)
    lines = [title, *(f"  {label:<{width}}  {value}" for label, value in rows)]
    return "\n".join([*lines, *(f"  note: {note}" for note in notes)])


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with a header; the first column is left-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [f"{row[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def to_json(plan: Any) -> str:
    """One line; infinite values become null."""
    return json.dumps(_plain(plan), ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
