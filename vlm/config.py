"""Every setting of the service, once: the command line and config files take names and defaults from here."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from llm.storage import KvOption, KvStorage, WeightOption

MEBIBYTE = 1 << 20  # what settings named *_mb count
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
    weights: WeightOption = "auto"  # stored as; auto: dtype, or bfloat16 where that loses nothing
    kv: KvOption = "auto"  # the KV cache stored as; auto: dtype
    threads: int = 1
    kv_cache_mb: int = 512
    visual_cache_mb: int = 256
    max_running: int = 16  # sequences decoded together
    max_tiles_per_step: int = 8  # tiles encoded between two decode steps
    prefix_cache: bool = True
    speculation: Literal["off", "ngram"] = "off"
    speculation_rows: int = 5  # most sequences x (guesses + 1) in a step; the batch at the machine's ridge

    @property
    def kv_storage(self) -> KvStorage:
        return self.dtype if self.kv == "auto" else self.kv


@dataclass(frozen=True, slots=True)
class ServeConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    broker: str = ""  # redis://...: preprocessing in Celery workers; empty: local processes
    store: str = ""  # blob store; empty: the broker
    remote_engine: bool = False  # answers come from generate workers behind the broker
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
    model_name: str = ""  # id shown to clients; empty: the model directory's name
    keys_file: str = ""  # TOML with [[keys]] tables, see vlm.api.guard.auth; empty: no authentication
    allow_public: bool = False  # listen on a public address though there are no keys
    requests_per_minute: int = 0  # per key; 0 is off; a key's own setting wins
    allow_urls: bool = False  # fetch http(s) images on clients' behalf
    fetch_deadline_s: float = 10.0
    root_path: str = ""  # path under which a proxy shows this server, such as /vlm; it may cut it off or not
    cors_origins: str = ""  # comma-separated; empty: no cross-origin requests
    default_max_tokens: int = 512
    max_choices: int = 8  # `n` of one request
    max_request_megapixels: int = 256  # of all images of one request
    max_decoded_mb: int = 4096  # decoded images of requests whose answer has not begun
    max_bodies_mb: int = 512  # request bodies being read or waiting for an answer
    body_timeout_s: float = 60.0  # to read one request's body
    data_dir: str = ""  # files and batches; empty: $XDG_DATA_HOME/vlm
    max_file_mb: int = 200
    max_files_mb: int = 4096  # of all stored files
    image_store_mb: int = 512  # of all uploaded images
    image_ttl_s: float = 86400.0
    log_format: Literal["auto", "json", "plain"] = "auto"  # auto: plain on a terminal, else json
    traces: bool = False  # OpenTelemetry spans over the stages; needs opentelemetry-api


def from_mapping(cls: type[T], values: dict[str, Any]) -> T:
    """A config of dataclass `cls`. Raises `ConfigError` naming unknown keys and wrong types."""
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(values.keys() - known.keys())
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    types = get_type_hints(cls)
    for name, value in values.items():
        default = known[name].default
        if get_origin(types[name]) is Literal and value not in get_args(types[name]):
            raise ConfigError(f"{name} is one of {', '.join(get_args(types[name]))}, not {value!r}")
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
