"""Figures of documents whose questions are asked behind the image and before it."""

from typing import Any

from vlm.bench.harness.results import result
from vlm.train.drawing.wordings import ABSENT
from vlm.train.evaluate import Report, share


def false_absences(found: Report) -> float:
    """The share of questions with an answer on the page that were told it is not there."""
    asked = sum(count for name, (_, count) in found.exact.items() if not name.endswith("/absent"))
    false = sum(
        failure.answered == ABSENT for failure in found.failures if not failure.kind.endswith("/absent")
    )
    return false / asked if asked else float("nan")


def summarise_orders(name: str, behind: Report, before: Report) -> dict[str, dict[str, Any]]:
    """Exact match by kind of question with the question behind the image, beside it before and on a blank
    page, and the character error rate of whole texts."""
    results = {}
    for kind in sorted({counted.split("/")[1] for counted in behind.exact}):
        value, asked = share(behind.exact, kind, _documents(behind))
        other, _ = share(before.exact, kind, _documents(before))
        blank, _ = share(behind.blank, kind, _documents(behind))
        results[f"{name}_{kind}"] = result(
            value, "exact", of=asked, before=round(other, 4), blank_page=round(blank, 4)
        )
    for kind in ("", *sorted(behind.edits)):
        wanted = [kind] if kind else list(behind.edits)
        results[f"{name}_cer_{kind or 'all'}"] = result(
            behind.character_error_rate(wanted),
            "edits/char",
            before=round(before.character_error_rate(wanted), 4),
        )
    return results


def _documents(found: Report) -> list[str]:
    return sorted({counted.split("/")[0] for counted in found.exact})
