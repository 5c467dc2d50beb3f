"""`vlm caption`: options of the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from vlm.cli.options import (
    ENGINE,
    EncoderDtype,
    EngineChoice,
    EngineModel,
    EngineUrlOption,
    Json,
    Kv,
    MaxPixels,
    Model,
    Store,
    Threads,
    Url,
    Weights,
    check_remote,
    setting,
)
from vlm.config import ServeConfig

_SERVE = ServeConfig()
_REMOTE_WINDOW = 24  # pages under way at a server: what its engine runs by default, and half more


def caption_command(
    context: typer.Context,
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Images, PDFs, folders, globs, @list.txt, OpenAI batch files (.jsonl)."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Where rows go; an existing one is continued. - is stdout.")
    ],
    preset: Annotated[
        Literal["caption", "text", "table", "formula", "chart", "summary", "fields"] | None,
        typer.Option(help="What to ask of every page. Default: caption."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Your own question instead of a preset.")] = None,
    schema: Annotated[
        Path | None, typer.Option(readable=False, help="JSON schema file; every answer matches it.")
    ] = None,
    form: Annotated[
        Literal["jsonl", "csv", "md", "markdown"] | None,
        typer.Option(
            "--format",
            help="Default: by the output's suffix, else jsonl. md, or markdown, turns DocTags into Markdown.",
        ),
    ] = None,
    url: Url = None,
    model: Model = "default",
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; the preset has its own.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None,
    dpi: Annotated[int, typer.Option(min=18, max=1200, help="Resolution of PDF pages.")] = 150,
    order: Annotated[
        Literal["auto", "instruction-first", "image-first"],
        typer.Option(help="auto: a long instruction comes first, so that all pages share its prefix."),
    ] = "auto",
    broker: Annotated[str, typer.Option(help="redis://...: decode in Celery workers.")] = _SERVE.broker,
    store: Store = _SERVE.store,
    threads: Threads = ENGINE.threads,
    engine: EngineChoice = ENGINE.engine,
    engine_url: EngineUrlOption = ENGINE.engine_url,
    engine_model: EngineModel = ENGINE.engine_model,
    weights: Weights = ENGINE.weights,
    kv: Kv = ENGINE.kv,
    encoder_dtype: EncoderDtype = ENGINE.encoder_dtype,
    max_pixels: MaxPixels = ENGINE.max_pixels,
    decode_processes: Annotated[int, setting(ServeConfig, "decode_processes", "Decode processes.")] = 1,
    window: Annotated[
        int | None, typer.Option(min=1, help="Pages under way. Default: what the engine runs, and half more.")
    ] = None,
    retry_errors: Annotated[bool, typer.Option("--retry-errors", help="Try failed pages again.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no summary.")] = False,
    as_json: Json = False,
) -> None:
    """Caption documents in bulk. The same command continues after any stop and never writes a page twice.

    Example: vlm caption scans/ "invoices/*.pdf" -o captions.jsonl --preset text
    """
    from vlm.build import build_served_pipeline
    from vlm.caption.caption_job import CaptionJob, engine_options, run_job
    from vlm.caption.caption_runner import RunOptions
    from vlm.caption.presets import make_question, read_schema
    from vlm.caption.remote_pages import PATIENCE_S, RemotePages
    from vlm.remote.remote_server import RemoteServer

    question = make_question(
        preset=preset,
        prompt=prompt,
        schema=read_schema(schema.read_text(encoding="utf-8")) if schema else None,
        max_tokens=max_tokens,
        order=order,
        dpi=dpi,
        max_pixels=max_pixels,
        seed=seed,
        temperature=temperature,
    )
    form = "md" if form == "markdown" else form
    named = check_remote(context, url)
    if url is not None:
        run = RunOptions(window=window or _REMOTE_WINDOW, retry_errors=retry_errors)
        job = CaptionJob(inputs, output, question, form, run, quiet=quiet, as_json=as_json)
        run_job(job, lambda: RemotePages(RemoteServer(url, PATIENCE_S), max_pixels, named))
        return
    options = engine_options(model, threads, question, engine=engine, weights=weights, kv=kv)
    options = replace(options, encoder_dtype=encoder_dtype, engine_url=engine_url, engine_model=engine_model)
    config = ServeConfig(broker=broker, store=store, decode_processes=decode_processes)
    run = RunOptions(window=window or options.max_running * 3 // 2, retry_errors=retry_errors)
    job = CaptionJob(inputs, output, question, form, run, quiet=quiet, as_json=as_json)
    run_job(job, lambda: build_served_pipeline(config, options))
