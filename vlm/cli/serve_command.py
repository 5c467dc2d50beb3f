"""`vlm serve`: settings from file and command line, then the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from vlm.config import DEFAULT_MODEL, EngineOptions, ServeConfig, read_config
from vlm.settings import ConfigError, from_mapping

T = TypeVar("T")


def merged(config_file: Path | None, given: Mapping[str, Any]) -> tuple[ServeConfig, EngineOptions]:
    """The file's settings, overridden by those that were `given`, whatever their value.

    Raises ConfigError; for what is wrong in the file it names the table.
    """
    tables = read_config(config_file) if config_file else {}
    if given.get("model") == "default":
        given = {**given, "model": DEFAULT_MODEL}
    return _merged("serve", ServeConfig, tables, given), _merged("engine", EngineOptions, tables, given)


def _merged(table: str, cls: type[T], tables: Mapping[str, dict[str, Any]], given: Mapping[str, Any]) -> T:
    values = tables.get(table, {})
    try:
        from_mapping(cls, values)
    except ConfigError as error:
        raise ConfigError(f"[{table}] in the --config file: {error}") from None
    chosen = {field.name: given[field.name] for field in fields(cls) if field.name in given}  # type: ignore[arg-type]
    return from_mapping(cls, values | chosen)


def serve_command(config_file: Path | None, given: Mapping[str, Any]) -> None:
    """`given`: settings that the command line names."""
    from vlm.api.server import run
    from vlm.build import build_served_pipeline

    config, engine = merged(config_file, given)
    run(build_served_pipeline(config, engine), config)
