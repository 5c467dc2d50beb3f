"""`vlm bench NAME`."""

from __future__ import annotations

import importlib
import json
from typing import Annotated

import typer

from vlm.cli.errors import CommandError

NAMES = (
    "engine",
    "encoder",
    "preprocess",
    "serve",
    "caption",
    "cluster",
    "plan",
    "decode",
    "accuracy",
    "peers",
    "quantise",
)


def bench_command(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(NAMES)}.")],
    part: Annotated[
        list[str] | None,
        typer.Option(help="Only this part, where there are any; may be given more than once."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds: a look, no figure to quote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout: one JSON object.")] = False,
) -> None:
    """Measure this installation beside its peers and its machine's limits.

    Example: vlm bench engine --json
    """
    if name not in NAMES:
        raise CommandError(f"unknown benchmark {name}; known: {', '.join(NAMES)}")
    try:
        module = importlib.import_module(f"vlm.bench.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"vlm.bench.{name}":
            raise
        raise CommandError(f"benchmark {name} is not part of this version") from None
    from vlm.bench.report import table

    chosen = {}
    if part:
        known = getattr(module, "PARTS", ())
        if unknown := [one for one in part if one not in known]:
            raise CommandError(
                f"{name} has no part {', '.join(unknown)}; known: {', '.join(known) or 'none'}"
            )
        chosen["parts"] = part
    document = module.run(quick=quick, **chosen)
    print(json.dumps(document) if as_json else table(document))
