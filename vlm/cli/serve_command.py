"""`vlm serve`: settings from file, environment and command line, then the server."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from vlm.config import DEFAULT_MODEL, EngineOptions, ServeConfig, read_config
from vlm.settings import SettingsError, from_mapping, from_text, is_secret

T = TypeVar("T")

PREFIX = "VLM_"  # of a setting's variable: VLM_PORT, VLM_KV_CACHE_MB
_KUBERNETES = re.compile(r"(tcp|udp)://")  # VLM_PORT in every pod beside a Service that is named vlm
_PASSWORD = re.compile(r"(?<=://)[^/@]*@")


@dataclass(frozen=True, slots=True)
class Merged(Generic[T]):
    table: str
    value: T
    sources: dict[str, str]  # by setting; a default has none


def merged(
    config_file: Path | None, given: Mapping[str, Any], environment: Mapping[str, str]
) -> tuple[Merged[ServeConfig], Merged[EngineOptions]]:
    """The file's settings, overridden by the environment's, overridden by those that were `given`.

    Raises ConfigError; for what is wrong in the file or the environment it names the place.
    """
    tables = read_config(config_file) if config_file else {}
    if given.get("model") == "default":
        given = {**given, "model": DEFAULT_MODEL}
    return (
        _merged("serve", ServeConfig, tables, given, environment),
        _merged("engine", EngineOptions, tables, given, environment),
    )


def _merged(
    table: str,
    cls: type[T],
    tables: Mapping[str, dict[str, Any]],
    given: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Merged[T]:
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    variables = {name: PREFIX + name.upper() for name in names}
    places = {
        f"[{table}] in the --config file": tables.get(table, {}),
        "the environment": {
            name: from_text(cls, name, environment[variable])
            for name, variable in variables.items()
            if variable in environment and not _KUBERNETES.match(environment[variable])
        },
    }
    for place, values in places.items():
        try:
            from_mapping(cls, values)
        except SettingsError as error:
            raise SettingsError(f"{place}: {error}") from None
    places["the command line"] = {name: given[name] for name in names if name in given}
    values = {name: value for found in places.values() for name, value in found.items()}
    sources = {name: place for place, found in places.items() for name in found}
    return Merged(table, from_mapping(cls, values), sources)


def shown(settings: Merged[Any]) -> str:
    """A table of a config file that has these settings; passwords are left out."""
    lines = [f"[{settings.table}]"]
    for field in fields(settings.value):
        value = getattr(settings.value, field.name)
        if is_secret(type(settings.value), field.name):
            value = _PASSWORD.sub("", value)
        source = settings.sources.get(field.name, "default")
        lines.append(f"{field.name} = {json.dumps(value)}  # {source}")
    return "\n".join(lines)


def serve_command(config_file: Path | None, given: Mapping[str, Any], print_config: bool = False) -> None:
    """`given`: settings that the command line names."""
    config, engine = merged(config_file, given, os.environ)
    if print_config:
        print(shown(config), shown(engine), sep="\n\n")
        return
    from vlm.api.server import run
    from vlm.build import build_served_pipeline

    run(build_served_pipeline(config.value, engine.value), config.value)
