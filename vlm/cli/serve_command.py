"""`vlm serve`: settings from file and command line, then the server."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vlm.config import EngineOptions, ServeConfig, from_mapping, read_config


def merged(
    config_file: Path | None, options: dict[str, dict[str, Any]], model: str | None, threads: int | None
) -> tuple[ServeConfig, EngineOptions]:
    """The file's settings, overridden by options that differ from their defaults."""
    tables = read_config(config_file) if config_file else {}
    serve = from_mapping(ServeConfig, tables.get("serve", {}))
    engine = from_mapping(EngineOptions, tables.get("engine", {}))
    given = _changed(ServeConfig, options["serve"])
    engine = replace(engine, **_changed(EngineOptions, options.get("engine", {})))
    if model is not None:
        engine = replace(engine, model=model)
    if threads is not None:
        engine = replace(engine, threads=threads)
    return replace(serve, **given), engine


def _changed(config: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    defaults = {f.name: f.default for f in fields(config)}
    return {name: value for name, value in options.items() if value != defaults[name]}


def serve_command(
    options: dict[str, dict[str, Any]],
    model: str | None,
    threads: int | None,
    config_file: Path | None,
    allow_public: bool,
) -> None:
    from vlm.api.server import run
    from vlm.build import build_served_pipeline

    config, engine = merged(config_file, options, model, threads)
    run(build_served_pipeline(config, engine), config, allow_public=allow_public)
