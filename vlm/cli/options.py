"""Options that commands share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from llm.storage import KvOption, WeightOption
from vlm.cli.errors import CommandError
from vlm.config import DEFAULT_MODEL, EngineName, EngineOptions
from vlm.settings import bounds

ENGINE = EngineOptions()


def setting(config: type, name: str, help: str) -> Any:
    """An option for a numeric setting, with the setting's own bounds."""
    limit = bounds(config, name)
    return typer.Option(min=limit.low, max=limit.high, help=help)


def given_options(context: typer.Context) -> dict[str, Any]:
    """What was named on the command line, even where it equals the default."""
    found = {}
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            found[name] = value
    return found


Model = Annotated[
    str,
    typer.Option(
        help="A checkpoint directory, a hub id (ORG/NAME or ORG/NAME@REVISION), "
        "open_clip:TOWER[@PRETRAINED]:DECODER, or 'default'."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Make the last line of stdout one JSON object.")]
Broker = Annotated[str, typer.Option(help="redis://host:port/db of the queue.")]
Store = Annotated[str, typer.Option(help="redis://... of the blob store; default: the broker.")]
Threads = Annotated[int, setting(EngineOptions, "threads", "Threads of the model.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
Dtype = Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of weights and activations.")]
Weights = Annotated[
    WeightOption,
    typer.Option(
        help="How weights are stored; int8 and int4 are rounded. auto: exactly, as small as that goes."
    ),
]
Kv = Annotated[KvOption, typer.Option(help="How the KV cache is stored; int8 is rounded. auto: not rounded.")]
EncoderDtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(
        help="Of the vision tower's products. auto: bfloat16 where this CPU multiplies it natively, several "
        "times as fast; float32 in a cluster, whose machines have to agree."
    ),
]
MaxPixels = Annotated[
    int,
    setting(
        EngineOptions,
        "max_pixels",
        "Largest image for models that take it whole, as Qwen-VL does; larger ones are shrunk. 0: by device.",
    ),
]
EngineChoice = Annotated[
    EngineName,
    typer.Option(
        help="What runs the model. auto: transformers where no family claims it. openai: the server at "
        "--engine-url; of --model only configuration and tokenizer are read."
    ),
]
Url = Annotated[
    str | None,
    typer.Option(help="http://host:port of a running server that answers instead; VLM_API_KEY has its key."),
]
_OF_AN_ENGINE = (
    *("threads", "engine", "engine_url", "weights", "kv", "encoder_dtype"),
    *("engine_model", "broker", "store", "decode_processes", "kv_disk", "kv_disk_mb"),
)


def check_remote(context: typer.Context, url: str | None) -> str | None:
    """With `url`: the model that was named, if any. Raises CommandError for options that are the server's."""
    given = given_options(context)
    if url is None:
        return None
    if theirs := [name for name in _OF_AN_ENGINE if name in given]:
        raise CommandError(f"--{theirs[0].replace('_', '-')} is the server's own setting: not with --url")
    model = given.get("model")
    return None if model == "default" else model


EngineUrlOption = Annotated[
    str,
    typer.Option(
        "--engine-url",
        help="http(s)://...: a server that speaks OpenAI's chat API, for --engine openai. Its key is read "
        "from the variable VLM_ENGINE_KEY.",
    ),
]
EngineModel = Annotated[
    str, typer.Option("--engine-model", help="The model's name there. Default: the first that it lists.")
]
KvDisk = Annotated[
    str,
    typer.Option(
        "--kv-disk",
        metavar="DIR",
        help="Keep KV blocks and visual tokens of images in files, across restarts.",
    ),
]
KvDiskMb = Annotated[int, setting(EngineOptions, "kv_disk_mb", "Most of them, in MiB.")]
DEFAULT_BROKER = "redis://127.0.0.1:6379/0"


def engine_options(model: str, **values: Any) -> EngineOptions:
    return EngineOptions(model=DEFAULT_MODEL if model == "default" else model, **values)
