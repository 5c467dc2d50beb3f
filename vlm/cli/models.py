"""`vlm pull`, `vlm models` and `vlm families`: which checkpoints there are, and what runs them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm.text_config import ConfigError, read_json_object
from vlm.cli.errors import CommandError
from vlm.config import DEFAULT_MODEL
from vlm.families.base import Family
from vlm.families.elsewhere import ELSEWHERE, ELSEWHERE_BY_TYPE, Elsewhere
from vlm.families.registry import BY_MODEL_TYPE, FAMILIES, find_family, unsupported
from vlm.foreign.engine_choice import only_in_transformers, transformers_types
from vlm.hub import Hub, cached_repo, missing_files, parse_hub_id

TRANSFORMERS = "transformers"  # runs what no family claims
EACH_ITS_OWN = "each model's own"  # licence
ANY_OTHER = "any other"  # title of what it runs without being named


@dataclass(frozen=True, slots=True)
class Here:
    """A checkpoint in the hub's cache, or the one that ships."""

    name: str
    revision: str  # of the hub: the commit
    model_type: str
    family: str  # title; empty where no family claims it
    runs: str  # what runs it, or why nothing does
    licence: str  # of a published checkpoint that a family lists; empty where it lists none
    bytes: int
    complete: bool


def pull(model: str, *, as_json: bool) -> None:
    """Downloads a checkpoint whole, and says what runs it. Raises HubError."""
    hub_id = parse_hub_id(model)
    if hub_id is None:
        raise CommandError(f"{model} is not a hub id; accepted: ORG/NAME or ORG/NAME@REVISION")
    folder = Hub(say=lambda line: print(f"vlm: {line}", file=sys.stderr, flush=True)).fetch(hub_id)
    here = _described(hub_id.repo, folder)
    if as_json:
        print(json.dumps(asdict(here) | {"path": str(folder)}))
        return
    print(f"{here.name} at {here.revision[:12]}: {_size(here.bytes)}, {here.runs}")
    print(folder)


def models(*, as_json: bool) -> None:
    found = sorted(_all_here(), key=lambda here: (here.name != "default", here.name))
    if as_json:
        print(json.dumps({"models": [asdict(here) for here in found]}))
        return
    for here in found:
        state = here.runs if here.complete else "partly downloaded: `vlm pull` gets the rest"
        commit = f"  {here.revision[:12]}" if here.revision else ""
        licence = f"; {here.licence}" if here.licence else ""
        print(f"{here.name:45} {_size(here.bytes):>9}  {here.model_type:12} {state}{licence}{commit}")


def families(*, as_json: bool) -> None:
    rows = family_rows()
    if as_json:
        print(json.dumps({"families": rows}))
        return
    for row in rows:
        if row["title"] == ANY_OTHER:
            print(f"{row['title']}: {len(row['model_types'])} model types; engine: {row['engine']}")
            continue
        print(f"{row['title']}: {', '.join(row['model_types'])}; engine: {row['engine']}")
        for size in row["sizes"]:
            print(f"  {size['repo']:45} {size['params']:>6}  {size['licence']}")


def family_rows() -> list[dict[str, Any]]:
    """What is native, what is known to run elsewhere, and last what else transformers runs."""
    known: list[tuple[Family | Elsewhere, str]] = [(family, "native") for family in FAMILIES]
    known += [(model, model.engine) for model in ELSEWHERE]
    rows: list[dict[str, Any]] = [
        {
            "model_types": list(model.model_types),
            "title": model.title,
            "engine": engine,
            "licence": ", ".join(dict.fromkeys(size.licence for size in model.sizes)) or EACH_ITS_OWN,
            "sizes": [asdict(size) for size in model.sizes],
        }
        for model, engine in known
    ]
    if others := sorted(transformers_types() - BY_MODEL_TYPE.keys() - ELSEWHERE_BY_TYPE.keys()):
        rows.append(
            {
                "model_types": others,
                "title": ANY_OTHER,
                "engine": TRANSFORMERS,
                "licence": EACH_ITS_OWN,
                "sizes": [],
            }
        )
    return rows


def _all_here() -> Iterator[Here]:
    yield _described("default", Path(DEFAULT_MODEL))
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in repos:
        for revision in repo.revisions if repo.repo_type == "model" else ():
            if (revision.snapshot_path / "config.json").is_file():
                yield _described(repo.repo_id, revision.snapshot_path)


def _described(name: str, folder: Path) -> Here:
    config: dict[str, Any] = {}
    try:
        config = read_json_object(folder / "config.json")
        family = find_family(config)
        other = TRANSFORMERS if only_in_transformers(config) else unsupported(config)
        runs = other if family is None else "native engine"
    except ConfigError as error:
        family, runs = None, str(error)
    sizes = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    published = [size for known in FAMILIES for size in known.sizes if size.repo == name]
    return Here(
        name=name,
        revision=folder.name if cached_repo(folder) else "",
        model_type=str(config.get("model_type", ""))[:40],
        family="" if family is None else family.title,
        runs=runs,
        licence=published[0].licence if published else "",
        bytes=sum(sizes),
        complete=not missing_files(folder),
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"
