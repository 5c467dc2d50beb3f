"""The `vlm` command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vlm.cli.errors import run
from vlm.cli.groups import CommandGroup
from vlm.cli.options import (
    ENGINE,
    EncoderDtype,
    EngineChoice,
    EngineModel,
    EngineUrlOption,
    Json,
    Kv,
    KvDisk,
    KvDiskMb,
    MaxPixels,
    Model,
    Store,
    Threads,
    Url,
    Weights,
    check_remote,
    engine_options,
    given_options,
    setting,
)
from vlm.cli.worker import app as worker
from vlm.config import ServeConfig

# command -> where it lives: its options are its package's, and a worker's image lacks what others need
LATE = {
    "caption": "vlm.caption.cli:caption_command",
    "bench": "vlm.bench.cli:bench_command",
    "train": "vlm.train.cli:train_command",
    "plan": "vlm.plan.cli:app",
}


class LateCommands(CommandGroup):
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
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(worker, name="worker")

SERVE = ServeConfig()
SETTINGS = "; ".join(
    f"[{table}]: {', '.join(field.name for field in fields(config))}"
    for table, config in (("serve", SERVE), ("engine", ENGINE))
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"vlm-serve {version('vlm-serve')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Answers questions about images and captions documents in bulk. Visual work is done once.

    Example: vlm ask invoice.png "What is the total?"

    Each command's --help has an example of its own.
    """


@app.command()
def ask(
    context: typer.Context,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE... [QUESTION]",
            help="Images and PDFs, then the question; - is stdin. Of a GIF the first frame.",
        ),
    ],
    question: Annotated[
        list[str],
        typer.Option(
            "-q", "--question", help="A question; may be repeated. All positionals are images then."
        ),
    ] = [],  # noqa: B006
    url: Url = None,
    model: Model = "default",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")] = None,
    threads: Threads = ENGINE.threads,
    engine: EngineChoice = ENGINE.engine,
    weights: Weights = ENGINE.weights,
    kv: Kv = ENGINE.kv,
    encoder_dtype: EncoderDtype = ENGINE.encoder_dtype,
    max_pixels: MaxPixels = ENGINE.max_pixels,
    pages: Annotated[
        str | None, typer.Option(help="Pages of PDFs and TIFFs, as in 1-3,7 or 5-. Default: all.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print timings and token counts.")] = False,
    as_json: Json = False,
) -> None:
    """Ask questions about images and documents.

    Example: vlm ask invoice.png -q "What is the total?" -q "What is the date?" --stats
    """
    from llm.request import SamplingParams
    from vlm.cli import ask as command

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    named = check_remote(context, url)
    remote = None if url is None else command.RunningServer(url, named, max_pixels)
    options = engine_options(
        model,
        threads=threads,
        engine=engine,
        weights=weights,
        kv=kv,
        encoder_dtype=encoder_dtype,
        max_pixels=max_pixels,
    )
    command.ask(images, question, remote or options, params, as_json=as_json, stats=stats, pages=pages)


@app.command()
def tokens(
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGE...", readable=False, help="Images, - for stdin; only their headers are read."
        ),
    ],
    model: Model = "default",
    detail: Annotated[Literal["auto", "low", "high"], typer.Option(help="As in the API.")] = "auto",
    max_pixels: MaxPixels = ENGINE.max_pixels,
    as_json: Json = False,
) -> None:
    """Show what images cost: grid, visual tokens, KV bytes. Nothing is decoded, no weights are loaded.

    Example: vlm tokens scans/*.jpg
    """
    from vlm.cli.tokens import show_tokens

    show_tokens(images, engine_options(model, max_pixels=max_pixels), detail, as_json=as_json)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(metavar="ORG/NAME[@REVISION]", help="A checkpoint's hub id.")],
    as_json: Json = False,
) -> None:
    """Download a checkpoint from the hub; files that arrived whole are kept when it breaks.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to other tools.

    Example: vlm pull HuggingFaceTB/SmolVLM-256M-Instruct
    """
    from vlm.cli.models import pull as command

    command(model, as_json=as_json)


@app.command()
def models(as_json: Json = False) -> None:
    """List the checkpoints that are here, and what runs them.

    Example: vlm models
    """
    from vlm.cli.models import models as command

    command(as_json=as_json)


@app.command()
def families(as_json: Json = False) -> None:
    """List the families of checkpoints that can be served, with sizes and licences.

    Example: vlm families
    """
    from vlm.cli.models import families as command

    command(as_json=as_json)


@app.command()
def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the measurements.")] = False,
    as_json: Json = False,
) -> None:
    """Check the installation and measure this machine.

    Example: vlm doctor
    """
    from vlm.cli.doctor_command import show_doctor

    show_doctor(quick=quick, as_json=as_json)


@app.command()
def serve(
    context: typer.Context,
    model: Model = "default",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = SERVE.host,
    port: Annotated[int, setting(ServeConfig, "port", "Port; 0 takes a free one.")] = SERVE.port,
    root_path: Annotated[
        str, typer.Option(help="Path under which a proxy shows this server, such as /vlm.")
    ] = SERVE.root_path,
    broker: Annotated[str, typer.Option(help="redis://...: decode images in Celery workers.")] = SERVE.broker,
    store: Store = SERVE.store,
    remote_engine: Annotated[
        bool,
        typer.Option(
            "--remote-engine/--no-remote-engine", help="Answers come from generate workers behind the broker."
        ),
    ] = SERVE.remote_engine,
    config: Annotated[
        Path | None,
        typer.Option(
            readable=False,
            help="TOML file with [serve] and [engine] tables. VLM_* variables win over it (VLM_PORT, "
            f"VLM_KV_CACHE_MB), options over both. {SETTINGS}",
        ),
    ] = None,
    embedder: Annotated[
        str,
        typer.Option(
            help="SigLIP model for /v1/embeddings: open_clip:NAME@PRETRAINED, open_clip:hf-hub:ORG/NAME or "
            "open_clip:local-dir:FOLDER."
        ),
    ] = SERVE.embedder,
    keys_file: Annotated[
        str, typer.Option(help="TOML file with [[keys]] tables of name and sha256; read again at SIGHUP.")
    ] = SERVE.keys_file,
    tls_certfile: Annotated[
        str, typer.Option(help="PEM certificate chain: serve HTTPS; read again at SIGHUP.")
    ] = SERVE.tls_certfile,
    tls_keyfile: Annotated[
        str, typer.Option(help="PEM key of the certificate, where it is a file of its own.")
    ] = SERVE.tls_keyfile,
    threads: Threads = ENGINE.threads,
    engine: EngineChoice = ENGINE.engine,
    engine_url: EngineUrlOption = ENGINE.engine_url,
    engine_model: EngineModel = ENGINE.engine_model,
    weights: Weights = ENGINE.weights,
    kv: Kv = ENGINE.kv,
    kv_disk: KvDisk = ENGINE.kv_disk,
    kv_disk_mb: KvDiskMb = ENGINE.kv_disk_mb,
    encoder_dtype: EncoderDtype = ENGINE.encoder_dtype,
    max_pixels: MaxPixels = ENGINE.max_pixels,
    allow_public: Annotated[
        bool,
        typer.Option("--allow-public/--no-allow-public", help="Listen beyond this machine without keys."),
    ] = SERVE.allow_public,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the settings and where they come from; then exit."),
    ] = False,
) -> None:
    """Serve the OpenAI-compatible API and the playground.

    Example: vlm serve --port 8000
    Example: VLM_API_KEYS=my-secret-key vlm serve --host 0.0.0.0
    Example: vlm serve --model Qwen/Qwen2.5-VL-3B-Instruct --engine openai --engine-url http://127.0.0.1:8080
    """
    from vlm.cli.serve_command import serve_command

    serve_command(config, given_options(context), print_config)


def main() -> None:
    run(lambda: app(standalone_mode=False, prog_name="vlm"))


if __name__ == "__main__":
    main()
