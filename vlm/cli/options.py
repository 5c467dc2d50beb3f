"""Options that commands share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from llm.storage import KvOption, WeightOption
from vlm.config import DEFAULT_MODEL, EngineOptions

Model = Annotated[
    str,
    typer.Option(
        help="A checkpoint directory, a hub id (ORG/NAME or ORG/NAME@REVISION), open_clip:TOWER:DECODER, or "
        "'default'."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Make the last line of stdout one JSON object.")]
Broker = Annotated[str, typer.Option(help="redis://host:port/db of the queue.")]
Store = Annotated[str, typer.Option(help="redis://... of the blob store; default: the broker.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of the model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of weights and activations.")]
Weights = Annotated[
    WeightOption,
    typer.Option(
        help="How weights are stored; int8 and int4 are rounded. auto: exactly, as small as that goes."
    ),
]
Kv = Annotated[KvOption, typer.Option(help="How the KV cache is stored; int8 is rounded. auto: not rounded.")]
DEFAULT_BROKER = "redis://127.0.0.1:6379/0"
ENGINE = EngineOptions()


def engine_options(model: str, **values: Any) -> EngineOptions:
    return EngineOptions(model=DEFAULT_MODEL if model == "default" else model, **values)
