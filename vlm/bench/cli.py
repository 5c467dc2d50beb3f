"""`vlm bench NAME`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from vlm.bench import BENCHMARKS, PARTS
from vlm.cli.errors import CommandError
from vlm.cli.options import Json
from vlm.extras import require

_LINES = "\n".join(f"  {name:11} {about}" for name, about in BENCHMARKS.items())
_PARTS = " ".join(f"Parts of {name}: {', '.join(parts)}." for name, parts in PARTS.items())
HELP = f"""Measure this installation beside its peers and its machine's limits.

A run takes one to ten minutes on a quiet machine, and reports its progress on stderr.

\b
Benchmarks:
{_LINES}

\b
Examples:
  vlm bench engine --json
  vlm bench caption --part kills --part memory
  vlm bench serve --part soak --seconds 600
  vlm bench serve --part sweep --plot sweep.png
"""


def bench_command(
    name: Annotated[str, typer.Argument(help="Which benchmark; see above.")],
    part: Annotated[
        list[str] | None,
        typer.Option(help=f"Only this part, may be given more than once. {_PARTS}"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="How long the part soak lasts.", show_default="300")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG file for the chart of the part sweep; needs the extra [plot].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rounds: a quick look, not figures to quote.")
    ] = False,
    as_json: Json = False,
) -> None:
    if name not in BENCHMARKS:
        raise CommandError(f"unknown benchmark {name}; known: {', '.join(BENCHMARKS)}")
    chosen: dict[str, Any] = {}
    if part:
        known = PARTS.get(name, ())
        if unknown := [one for one in part if one not in known]:
            raise CommandError(
                f"{name} has no part {', '.join(unknown)}; known: {', '.join(known) or 'none'}"
            )
        chosen["parts"] = part
    if seconds is not None:
        if "soak" not in (part or ()):
            raise CommandError("--seconds is for a soak: vlm bench serve --part soak --seconds 600")
        chosen["seconds"] = seconds
    if plot is not None:
        if "sweep" not in (part or ()):
            raise CommandError("--plot is for a sweep: vlm bench serve --part sweep --plot sweep.png")
        from vlm.plan.plots import check_plot

        check_plot(plot)
        chosen["plot"] = plot
    require("bench", "vlm bench", "num2words", "torchvision")
    from vlm.bench.harness.results import table

    module = importlib.import_module(f"vlm.bench.{name}_bench")
    document = module.run(quick=quick, **chosen)
    print(json.dumps(document) if as_json else table(document))


bench_command.__doc__ = HELP
