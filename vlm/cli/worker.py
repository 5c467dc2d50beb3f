"""`vlm worker`: the stages of the pipeline as Celery workers."""

from __future__ import annotations

from typing import Annotated

import typer

from vlm.cli.groups import CommandGroup
from vlm.cli.options import (
    DEFAULT_BROKER,
    ENGINE,
    Broker,
    Device,
    Dtype,
    EncoderDtype,
    Kv,
    KvDisk,
    KvDiskMb,
    Model,
    Store,
    Threads,
    Weights,
    engine_options,
    setting,
)
from vlm.config import EngineOptions, ServeConfig

app = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode=None)


@app.callback()
def workers() -> None:
    """Celery workers for the stages of the pipeline.

    Example: vlm worker preprocess --broker redis://127.0.0.1:6379/0
    """


@app.command("preprocess")
def worker_preprocess(
    broker: Broker = DEFAULT_BROKER,
    store: Store = "",
    concurrency: Annotated[int, setting(ServeConfig, "decode_processes", "Decode processes.")] = 1,
) -> None:
    """Decode and tile images for servers that share the broker. Never loads torch.

    Example: vlm worker preprocess --broker redis://127.0.0.1:6379/0 --concurrency 4
    """
    from workers.cluster.worker.preprocess_worker import run as run_worker

    run_worker(broker, store or broker, concurrency)


@app.command("encode")
def worker_encode(
    model: Model = "default",
    broker: Broker = DEFAULT_BROKER,
    store: Store = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Images taken from the queue at once.")] = 32,
    threads: Threads = ENGINE.threads,
    device: Device = ENGINE.device,
    dtype: Dtype = ENGINE.dtype,
    encoder_dtype: EncoderDtype = ENGINE.encoder_dtype,
) -> None:
    """Encode tiles into visual tokens for generate workers that share the broker.

    Example: vlm worker encode --broker redis://127.0.0.1:6379/0
    """
    from vlm.build import build_tile_batcher, visual_format
    from vlm.model_source import pinned
    from workers.cluster.worker.encode_worker import run as run_worker

    options = engine_options(model, threads=threads, device=device, dtype=dtype, encoder_dtype=encoder_dtype)
    options = pinned(options)
    run_worker(
        broker,
        store or broker,
        lambda progress: build_tile_batcher(options, progress),
        visual_format(options),
        concurrency,
        options.stall_s,
    )


@app.command("generate")
def worker_generate(
    model: Model = "default",
    broker: Broker = DEFAULT_BROKER,
    store: Store = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests taken from the queue at once.")] = 64,
    name: Annotated[str, typer.Option(help="Of the replica; default: host name and a random part.")] = "",
    threads: Threads = ENGINE.threads,
    device: Device = ENGINE.device,
    dtype: Dtype = ENGINE.dtype,
    encoder_dtype: EncoderDtype = ENGINE.encoder_dtype,
    weights: Weights = ENGINE.weights,
    kv: Kv = ENGINE.kv,
    kv_cache_mb: Annotated[
        int, setting(EngineOptions, "kv_cache_mb", "Memory for KV blocks; 0: 512, on a GPU what is free.")
    ] = ENGINE.kv_cache_mb,
    kv_disk: KvDisk = ENGINE.kv_disk,
    kv_disk_mb: KvDiskMb = ENGINE.kv_disk_mb,
    max_running: Annotated[
        int, setting(EngineOptions, "max_running", "Sequences decoded together.")
    ] = ENGINE.max_running,
) -> None:
    """Answer requests of servers that run with --remote-engine on the same broker.

    Example: vlm worker generate --broker redis://127.0.0.1:6379/0 --threads 8
    """
    from vlm.build import build_runner
    from vlm.model_source import pinned
    from workers.cluster.worker.generate_worker import run as run_worker

    options = engine_options(
        model,
        threads=threads,
        device=device,
        dtype=dtype,
        encoder_dtype=encoder_dtype,
        weights=weights,
        kv=kv,
        kv_cache_mb=kv_cache_mb,
        kv_disk=kv_disk,
        kv_disk_mb=kv_disk_mb,
        max_running=max_running,
    )
    options = pinned(options)
    run_worker(
        broker,
        store or broker,
        lambda progress: build_runner(options, progress=progress),
        concurrency,
        name or None,
        options.stall_s,
    )
