"""Compares a computed value with a figure as an article prints it."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal


def rounded(value: float, figure: str, step: str | None = None) -> str:
    """`value` at the precision of `figure`: its decimals, or the place of its last non-zero digit.

    `step` overrides that: "5" rounds to multiples of 5. Separators and signs are the figure's business.
    """
    digits = figure.replace(",", "")
    if step is None:
        if "." in digits:
            step = "0." + "0" * (len(digits.split(".")[1]) - 1) + "1"
        else:
            step = "1" + "0" * (len(digits) - len(digits.rstrip("0")))
    quantum = Decimal(step)
    steps = (Decimal(repr(value)) / quantum).quantize(Decimal(1), rounding=ROUND_HALF_UP)
    return f"{steps * quantum:f}"


def shows(value: float, figure: str, step: str | None = None) -> bool:
    """Whether `value`, rounded as the article rounds, is the article's figure."""
    return Decimal(rounded(value, figure, step)) == Decimal(figure.replace(",", ""))
