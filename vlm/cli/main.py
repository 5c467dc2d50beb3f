"""The `vlm` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from llm.storage import KvOption, WeightOption
from vlm.cli.errors import run
from vlm.config import DEFAULT_MODEL, EngineOptions, ServeConfig

# command -> where it lives: its options are its package's, and a worker's image lacks what others need
LATE = {
    "caption": "vlm.caption.cli:caption_command",
    "bench": "vlm.bench.cli:bench_command",
    "train": "vlm.train.cli:train_command",
    "plan": "vlm.plan.cli:app",
}


class LateCommands(TyperGroup):
    """Imports a command of LATE when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(name for name in LATE if name not in self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LATE and cmd_name not in self.commands:
            module, _, attribute = LATE[cmd_name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
            if not isinstance(found, typer.Typer):
                found, function = typer.Typer(add_completion=False, rich_markup_mode=None), found
                found.command(cmd_name)(function)
            self.add_command(typer.main.get_command(found), cmd_name)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="vlm",
    cls=LateCommands,
    help="Answers questions about images and captions documents in bulk. Visual work is done once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
worker = typer.Typer(
    help="Celery workers for the stages of the pipeline.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(worker, name="worker")

Model = Annotated[str, typer.Option(help="A Hugging Face checkpoint directory, or 'default'.")]
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
Kv = Annotated[KvOption, typer.Option(help="How the KV cache is stored; int8 is rounded. auto: as dtype.")]
DEFAULT_BROKER = "redis://127.0.0.1:6379/0"
ENGINE, SERVE = EngineOptions(), ServeConfig()


def _engine_options(model: str, **values: Any) -> EngineOptions:
    return EngineOptions(model=DEFAULT_MODEL if model == "default" else model, **values)


@app.command()
def ask(
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE... [QUESTION]", help="Images, then the question.")
    ],
    question: Annotated[
        list[str],
        typer.Option(
            "-q", "--question", help="A question; may be repeated. All positionals are images then."
        ),
    ] = [],  # noqa: B006
    model: Model = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the model.")] = ENGINE.threads,
    weights: Weights = ENGINE.weights,
    kv: Kv = ENGINE.kv,
    stats: Annotated[bool, typer.Option("--stats", help="Print timings and token counts.")] = False,
    as_json: Json = False,
) -> None:
    """Ask questions about images.

    Example: vlm ask invoice.png -q "What is the total?" -q "What is the date?" --stats
    """
    from llm.request import SamplingParams
    from vlm.cli import ask as command

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    options = _engine_options(model, threads=threads, weights=weights, kv=kv)
    command.ask(images, question, options, params, as_json=as_json, stats=stats)


@app.command()
def tokens(
    images: Annotated[list[Path], typer.Argument(help="Images; only their headers are read.")],
    model: Model = "default",
    detail: Annotated[Literal["auto", "low", "high"], typer.Option(help="As in the API.")] = "auto",
    as_json: Json = False,
) -> None:
    """Show what images cost: grid, visual tokens, KV bytes. Nothing is decoded, no weights are loaded.

    Example: vlm tokens scans/*.jpg
    """
    from vlm.cli.tokens import show_tokens

    show_tokens(images, _engine_options(model).model, detail, as_json=as_json)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the measurements.")] = False,
    as_json: Json = False,
) -> None:
    """Check the installation and measure this machine.

    Example: vlm doctor
    """
    from vlm.cli.doctor import show_doctor

    show_doctor(quick=quick, as_json=as_json)


@app.command()
def serve(
    model: Model = "default",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = SERVE.host,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = SERVE.port,
    broker: Annotated[str, typer.Option(help="redis://...: decode images in Celery workers.")] = SERVE.broker,
    store: Annotated[str, typer.Option(help="redis://...: blob store; default: the broker.")] = SERVE.store,
    remote_engine: Annotated[
        bool, typer.Option("--remote-engine", help="Answers come from generate workers behind the broker.")
    ] = SERVE.remote_engine,
    config: Annotated[Path | None, typer.Option(help="TOML file with [serve] and [engine] tables.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine.")] = None,
    weights: Weights = ENGINE.weights,
    kv: Kv = ENGINE.kv,
    allow_public: Annotated[
        bool, typer.Option("--allow-public", help="Listen beyond this machine although no keys are set.")
    ] = False,
) -> None:
    """Serve the OpenAI-compatible API and the playground.

    Example: vlm serve --port 8000
    """
    from vlm.cli.serve import serve_command

    serve_command(
        options={
            "serve": {
                "host": host,
                "port": port,
                "broker": broker,
                "store": store,
                "remote_engine": remote_engine,
            },
            "engine": {"weights": weights, "kv": kv},
        },
        model=None if model == "default" else model,
        threads=threads,
        config_file=config,
        allow_public=allow_public,
    )


@worker.command("preprocess")
def worker_preprocess(
    broker: Broker = DEFAULT_BROKER,
    store: Store = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Decode processes, one thread each.")] = 1,
) -> None:
    """Decode and tile images for servers that share the broker. Never loads torch.

    Example: vlm worker preprocess --broker redis://127.0.0.1:6379/0 --concurrency 4
    """
    from workers.preprocess_worker import run as run_worker

    run_worker(broker, store or broker, concurrency)


@worker.command("encode")
def worker_encode(
    model: Model = "default",
    broker: Broker = DEFAULT_BROKER,
    store: Store = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Images taken from the queue at once.")] = 32,
    threads: Threads = ENGINE.threads,
    device: Device = ENGINE.device,
    dtype: Dtype = ENGINE.dtype,
) -> None:
    """Encode tiles into visual tokens for generate workers that share the broker.

    Example: vlm worker encode --broker redis://127.0.0.1:6379/0
    """
    from vlm.build import build_tile_batcher, visual_format
    from workers.encode_worker import run as run_worker

    options = _engine_options(model, threads=threads, device=device, dtype=dtype)
    run_worker(
        broker, store or broker, lambda: build_tile_batcher(options), visual_format(options), concurrency
    )


@worker.command("generate")
def worker_generate(
    model: Model = "default",
    broker: Broker = DEFAULT_BROKER,
    store: Store = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests taken from the queue at once.")] = 64,
    name: Annotated[str, typer.Option(help="Of the replica; default: host name and a random part.")] = "",
    threads: Threads = ENGINE.threads,
    device: Device = ENGINE.device,
    dtype: Dtype = ENGINE.dtype,
    weights: Weights = ENGINE.weights,
    kv: Kv = ENGINE.kv,
    kv_cache_mb: Annotated[int, typer.Option(min=1, help="Memory for KV blocks.")] = ENGINE.kv_cache_mb,
    max_running: Annotated[int, typer.Option(min=1, help="Sequences decoded together.")] = ENGINE.max_running,
) -> None:
    """Answer requests of servers that run with --remote-engine on the same broker.

    Example: vlm worker generate --broker redis://127.0.0.1:6379/0 --threads 8
    """
    from vlm.build import build_runner
    from workers.generate_worker import run as run_worker

    options = _engine_options(
        model,
        threads=threads,
        device=device,
        dtype=dtype,
        weights=weights,
        kv=kv,
        kv_cache_mb=kv_cache_mb,
        max_running=max_running,
    )
    run_worker(broker, store or broker, lambda: build_runner(options), concurrency, name or None)


def main() -> None:
    run(lambda: app(standalone_mode=False))


if __name__ == "__main__":
    main()
