"""Every setting of the service, once: the command line and config files take names and defaults from here."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

DEFAULT_MODEL = str(Path(__file__).parent / "model")

T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that is unknown or out of range; the message names it and what is accepted."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine process needs to build itself; travels to it as JSON."""

    model: str = DEFAULT_MODEL  # a Hugging Face checkpoint directory
    backend: Literal["auto", "torch", "native"] = "auto"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = 1
    kv_cache_mb: int = 512
    visual_cache_mb: int = 256
    max_running: int = 16  # sequences decoded together
    max_tiles_per_step: int = 8  # tiles encoded between two decode steps
    prefix_cache: bool = True


@dataclass(frozen=True, slots=True)
class ServeConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    broker: str = ""  # redis://...: preprocessing in Celery workers; empty: local processes
    store: str = ""  # blob store; empty: the broker
    decode_processes: int = 2
    max_images_per_request: int = 16
    max_image_mb: int = 32
    max_image_megapixels: int = 100
    max_request_mb: int = 64
    max_queued: int = 256
    request_deadline_s: float = 300.0
    image_deadline_s: float = 30.0
    drain_s: float = 30.0
    variant: Literal["fast", "exact"] = "fast"


def from_mapping(cls: type[T], values: dict[str, Any]) -> T:
    """A config of dataclass `cls`. Raises `ConfigError` naming unknown keys and wrong types."""
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    for name, value in values.items():
        default = known[name].default
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            continue
        if type(value) is not type(default):
            raise ConfigError(f"{name} takes a {type(default).__name__}, not {type(value).__name__}")
    return cls(**values)


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """A TOML file with the tables [serve] and [engine]."""
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    unknown = sorted(tables.keys() - {"serve", "engine"})
    if unknown:
        raise ConfigError(f"unknown table {', '.join(unknown)} in {path}; known: engine, serve")
    return tables
