"""`vlm tokens`: what images cost, from their headers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from preprocess.types import Detail
from vlm.cli.errors import BAD_INPUT, PARTIAL, CommandError
from vlm.cli.file_names import one_line
from vlm.cli.images import check_stdin, name_of, naming, read_image
from vlm.config import EngineOptions
from vlm.foreign.engine_choice import takes_transformers
from vlm.foreign.foreign_spec import UNKNOWN_COST
from vlm.headers import read_header
from vlm.model_source import ModelSource
from vlm.spec import ModelSpec


def image_cost(spec: ModelSpec, data: bytes, detail: Detail) -> dict[str, Any]:
    info = read_header(data)
    grid = spec.preprocess_spec(detail).rule.grid(info.width, info.height, detail)
    image_tokens = spec.geometry.rows(grid)
    return {
        "width": info.width,
        "height": info.height,
        "format": info.format,
        "rows": grid.rows,
        "cols": grid.cols,
        "tiles": grid.num_tiles,
        "image_tokens": image_tokens,
        "prompt_tokens": spec.image_prompt_tokens(grid),
        "kv_bytes": spec.kv_bytes(spec.image_prompt_tokens(grid)),
    }


def show_tokens(paths: Sequence[Path], options: EngineOptions, detail: Detail, *, as_json: bool) -> None:
    """One image that can't be read does not keep the others' costs back; the exit code tells."""
    check_stdin(paths)
    if takes_transformers(options, ModelSource.parse(options.model, "text")):
        raise CommandError(UNKNOWN_COST)
    spec = ModelSpec.load(options.model, files="text", max_pixels=options.pixel_cap)
    rows: list[dict[str, Any]] = []
    refusals: list[CommandError] = []
    for path in paths:
        try:
            data = read_image(path)
            with naming(path, data):
                rows.append({"path": name_of(path), **image_cost(spec, data, detail)})
        except CommandError as error:
            refusals.append(error)
    if not rows and len(refusals) == 1:
        raise refusals[0]
    for refusal in refusals:
        print(f"vlm: {one_line(str(refusal))}", file=sys.stderr)
    if rows:
        _print_rows(spec, rows, as_json=as_json)
    if refusals:
        raise CommandError(
            f"{len(refusals)} of {len(paths)} images can't be read", PARTIAL if rows else BAD_INPUT
        )


def _print_rows(spec: ModelSpec, rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"model": spec.name, "images": rows}, ensure_ascii=False))
        return
    print(
        f"{'image':32} {'size':>11} {'grid':>7} {'tiles':>5} {'visual tokens':>13} {'prompt':>7} "
        f"{'KV bytes':>12}"
    )
    for row in rows:
        size, grid = f"{row['width']}x{row['height']}", f"{row['rows']}x{row['cols']}"
        name = one_line(row["path"])[-32:]
        print(
            f"{name:32} {size:>11} {grid:>7} {row['tiles']:>5} {row['image_tokens']:>13} "
            f"{row['prompt_tokens']:>7} {row['kv_bytes']:>12,}"
        )
    if len(rows) > 1:
        total = [
            sum(row[name] for row in rows) for name in ("tiles", "image_tokens", "prompt_tokens", "kv_bytes")
        ]
        print(f"{'total':32} {'':>11} {'':>7} {total[0]:>5} {total[1]:>13} {total[2]:>7} {total[3]:>12,}")
