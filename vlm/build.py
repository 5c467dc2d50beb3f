"""The one composition root: options in, a pipeline or an engine runner out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llm.engine_config import EngineConfig
from llm.storage import storage_of
from preprocess.limits import ImageLimits
from preprocess.process_memory import keep_what_is_loaded
from preprocess.types import Variant
from vlm.arithmetic import settled
from vlm.checkpoint import Checkpoint
from vlm.config import MEBIBYTE, EngineOptions, ServeConfig, SettingsError
from vlm.foreign.engine_choice import notice, takes_transformers
from vlm.foreign.foreign_spec import ForeignSpec
from vlm.model_source import OPEN_CLIP_POOLING_SIDE, OPEN_CLIP_SEED, ModelSource, naming, pinned
from vlm.pipeline import Pipeline
from vlm.plan.machine.engine_rules import read_rule, swap_rule
from vlm.spec import BLOCK_SIZE, ModelSpec
from workers.children.child import module_command
from workers.children.grammar_process import GrammarProcess
from workers.contract.engine_client import EngineClient
from workers.contract.stages import PreprocessStage
from workers.contract.visual_format import VisualFormat
from workers.local.disk_cache import DiskCache, weights_digest
from workers.local.engine_process import EngineProcess, Runner
from workers.local.engine_runner import EngineRunner
from workers.local.engine_thread import LocalEngine
from workers.local.preprocess_inline import InlinePreprocess
from workers.local.progress import Progress

if TYPE_CHECKING:
    from encoder.batcher import TileBatcher
    from encoder.encoder_model import Encoder
    from llm.backend.base import Backend


def check_device(name: str) -> None:
    """Raises SettingsError for a device that torch has not on this machine. Imports torch."""
    import torch

    try:
        torch.empty(1, device=name).cpu()
    except (RuntimeError, NotImplementedError, AssertionError):
        raise SettingsError(f"device is {name}, and torch finds no such device on this machine") from None


@contextmanager
def fitting(device: str) -> Iterator[None]:
    """Raises SettingsError in one line for a model that needs more memory than the device has."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:
        raise SettingsError(
            f"the model and its KV cache need more memory than {device} has free; dtype bfloat16 halves it, "
            "and kv_cache_mb limits the cache"
        ) from None


def build_encoder(source: ModelSource, options: EngineOptions) -> Encoder:
    """The tower and connector of a checkpoint, or of the articles' form. Imports torch."""
    import torch

    check_device(options.device)
    torch.set_num_threads(options.threads)
    with naming(source.directory):
        encoder = _load_encoder(source, options)
    encoder.multiply_in(options.arithmetic)
    return encoder


def _load_encoder(source: ModelSource, options: EngineOptions) -> Encoder:
    import torch

    from encoder.encoder_weights import load_open_clip
    from vlm.loading import load_encoder

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[options.dtype]
    if not source.tower:
        return load_encoder(source.directory, device=options.device, dtype=dtype)
    return load_open_clip(
        source.tower,
        d_model=Checkpoint.read(source.directory).decoder.d_model,
        reduction=OPEN_CLIP_POOLING_SIDE,
        seed=OPEN_CLIP_SEED,
        pretrained=source.tower_file,
        connector_weights=source.connector_file,
        device=options.device,
        dtype=dtype,
    )


def _tile_batcher(encoder: Encoder, options: EngineOptions, progress: Progress | None) -> TileBatcher:
    from encoder.batcher import TileBatcher
    from encoder.cache import VisualCache

    if progress is not None:
        encoder.count_progress(progress.ticks)
    return TileBatcher(
        encoder.encode,
        VisualCache(options.visual_cache_mb * MEBIBYTE),
        num_rows=encoder.num_rows,
        work=encoder.flops,
        packer=encoder if encoder.config.packing else None,
        max_tiles=options.max_tiles_per_step,
        max_step_s=options.max_step_ms / 1e3,
        max_batch_tiles=max(1, encoder.tiles_per_forward // 8),  # short, for little more per tile
    )


def build_tile_batcher(options: EngineOptions, progress: Progress | None = None) -> TileBatcher:
    """The encoder alone, for an encode worker; it counts in `progress`. Imports torch."""
    return _tile_batcher(build_encoder(ModelSource.parse(options.model), options), options, progress)


def visual_format(options: EngineOptions) -> VisualFormat:
    """What an encode worker of these options computes, from files alone."""
    spec = ModelSpec.load(options.model, arithmetic=options.arithmetic)
    return VisualFormat(spec.revision, options.dtype, spec.decoder.row_width)


def _open_disk(
    options: EngineOptions, source: ModelSource, backend: Backend, encoder: Encoder
) -> DiskCache | None:
    """Raises ValueError where the folder can't be used."""
    if not options.kv_disk:
        return None
    weights = options.dtype if options.weights == "auto" else options.weights
    model = f"{weights_digest(source.directory)} {options.dtype} {weights}"
    form = VisualFormat(encoder.revision, options.dtype, encoder.row_width)
    try:
        folder, cap_bytes = Path(options.kv_disk).expanduser(), options.kv_disk_mb * MEBIBYTE
        return DiskCache(folder, cap_bytes, f"{model} {BLOCK_SIZE} {backend.kv_layout}", form)
    except OSError as error:
        raise ValueError(f"kv_disk: {options.kv_disk} can't be used: {error.strerror}") from None


def _scheduling(options: EngineOptions) -> EngineConfig:
    return EngineConfig(
        max_running=options.max_running,
        max_step_ms=options.max_step_ms,
        prefix_cache=options.prefix_cache,
        swap_rule=swap_rule(options),
        speculation=options.speculation,
        speculation_rule=lambda batch, num_draft: batch * (num_draft + 1) <= options.speculation_rows,
    )


def _run_beside(encoder: Encoder, backend: Backend) -> None:
    """On a GPU: forwards are captured, and a step with visual rows waits for the encodes before it."""
    import torch

    from llm.backend.cuda.graphs import CudaRecorder
    from llm.backend.cuda.paged_backend import PagedBackend

    pool = torch.cuda.graph_pool_handle()
    encoder.capture_forwards(lambda: CudaRecorder(pool))
    assert isinstance(backend, PagedBackend)
    backend.wait_for_visuals = encoder.wait


def build_runner(
    options: EngineOptions, scheduling: EngineConfig | None = None, *, progress: Progress | None = None
) -> EngineRunner:
    """Loads weights and builds encoder, cache, batcher and engine. Imports torch.

    `scheduling` replaces the engine settings that `options` would give. Encoder and backend count in
    `progress`, and so do the stages of loading.
    """
    from llm.constraints.constrain import Grammars
    from llm.engine import Engine
    from llm.visuals import VisualSource
    from vlm.loading import load_backend

    source = ModelSource.parse(options.model)
    progress = progress or Progress()
    progress.tick()
    with fitting(options.device):
        encoder = build_encoder(source, options)
        progress.tick()
        with naming(source.directory):
            backend = load_backend(
                source.directory,
                block_size=BLOCK_SIZE,
                kv_bytes=options.kv_bytes,
                device=options.device,
                dtype=options.dtype,
                backend=options.backend,
                weights=options.weights,
                kv=options.kv,
            )
    backend.count_progress(progress.ticks)
    if options.device.startswith("cuda"):
        _run_beside(encoder, backend)
    progress.tick()
    tokenizer = Checkpoint.read(source.directory).tokenizer
    batcher = _tile_batcher(encoder, options, progress)
    config = scheduling or _scheduling(options)

    grammars = None
    if tokenizer.eos_ids:
        grammars = Grammars(
            tokenizer.vocabulary(),
            tokenizer.eos_ids,
            backend.vocab_size,
            check=GrammarProcess,
            others={skip: tokenizer.vocabulary(skip_special=skip) for skip in tokenizer.other_ways},
        )

    disk = _open_disk(options, source, backend, encoder)
    progress.tick()

    def make_engine(visuals: VisualSource) -> Engine:
        return Engine(
            backend,
            visuals,
            config,
            tokenizer,
            tokenizer.eos_ids,
            grammars=grammars,
            store=disk,
            read_rule=read_rule(options, backend),
        )

    about = {
        "model": source.name,
        "backend": type(backend).__name__,
        "dtype": options.dtype,
        "weights": options.weights,
        "kv": options.kv_storage,
        "threads": options.threads,
        "num_blocks": backend.num_blocks,
        "block_size": backend.block_size,
        "encoder_revision": encoder.revision,
        "visual_width": encoder.row_width,
        "max_running": config.max_running,
    }
    keep_what_is_loaded()
    return EngineRunner(
        batcher, make_engine, about=about, busy_max_tiles=encoder.tiles_per_forward, disk=disk
    )


def build_any_runner(options: EngineOptions, progress: Progress) -> Runner:
    """By whichever engine takes the model. Imports torch."""
    if not takes_transformers(options, ModelSource.parse(options.model)):
        return build_runner(options, progress=progress)
    from vlm.foreign.foreign_engine import build_foreign_runner

    check_device(options.device)
    with fitting(options.device):
        return build_foreign_runner(options, progress)


def _foreign_spec(options: EngineOptions) -> ForeignSpec | None:
    """Of a model that transformers runs. Raises SettingsError and ConfigError."""
    source = ModelSource.parse(options.model)
    if not takes_transformers(options, source):
        return None
    if options.engine == "auto":
        notice(source)
    return ForeignSpec.load(source, options.kv_storage)


def _spec(options: EngineOptions, variant: Variant) -> ModelSpec:
    return ModelSpec.load(
        options.model,
        variant=variant,
        kv=options.kv_storage,
        max_pixels=options.pixel_cap,
        arithmetic=options.arithmetic,
    )


def build_local_pipeline(
    options: EngineOptions, *, variant: Variant = "fast", preprocess: PreprocessStage | None = None
) -> Pipeline:
    """Everything in this process: for one-off commands and tests."""
    if options.engine == "openai":
        from vlm.upstream.compose import upstream_pipeline

        return upstream_pipeline(options)
    options = pinned(options)
    foreign = _foreign_spec(options)
    if foreign is not None:
        engine = EngineProcess(engine_command(options), stall_s=options.stall_s)
        return Pipeline(foreign, preprocess or InlinePreprocess(), engine)
    options = settled(options)
    spec = _spec(options, variant)
    return Pipeline(spec, preprocess or InlinePreprocess(), LocalEngine(lambda: build_runner(options)))


def engine_command(options: EngineOptions) -> list[str]:
    return [*module_command("vlm.engine_main"), "--options", json.dumps(asdict(options))]


def image_limits(config: ServeConfig) -> ImageLimits:
    return ImageLimits(
        max_bytes=config.max_image_mb * MEBIBYTE,
        max_pixels=config.max_image_megapixels * 1_000_000,
        max_request_pixels=config.max_request_megapixels * 1_000_000,
    )


def build_preprocess(config: ServeConfig) -> PreprocessStage:
    """Celery workers where a broker is named, processes of our own otherwise."""
    if not config.broker:
        from workers.local.preprocess_pool import LocalPreprocess

        return LocalPreprocess(config.decode_processes)
    from workers.cluster.node.preprocess_celery import CeleryPreprocess

    return CeleryPreprocess(config.broker, config.store or config.broker)


def build_engine_client(
    config: ServeConfig, options: EngineOptions, spec: ModelSpec | ForeignSpec
) -> EngineClient:
    """A process of our own, or the generate workers behind the broker. Raises SettingsError."""
    if not config.remote_engine:
        return EngineProcess(engine_command(options), stall_s=options.stall_s)
    if not config.broker:
        raise SettingsError("a remote engine needs a broker: --remote-engine --broker redis://HOST:PORT/0")
    from workers.cluster.node.remote_engine import RemoteEngine

    return RemoteEngine(
        config.broker,
        config.store or config.broker,
        revision=spec.revision,
        deadline_s=config.request_deadline_s,
        image_deadline_s=config.image_deadline_s,
    )


def check_storage(options: EngineOptions) -> None:
    """Before a process is started for it. Raises SettingsError where the backend can't store so."""
    from llm.backend.native_build import why_unavailable

    reason = "" if options.backend == "torch" or options.device != "cpu" else why_unavailable()
    if reason is None:
        return
    try:
        storage_of(options.dtype, options.weights, options.kv, native=False)
    except ValueError as error:
        raise SettingsError("; ".join(filter(None, (str(error), reason)))) from None


def build_served_pipeline(config: ServeConfig, options: EngineOptions) -> Pipeline:
    """What `vlm serve` runs: the engine in another process or elsewhere, decoding off the serving path.

    Raises ValueError for options that can't be had here, before a process is started for them.
    """
    if options.engine == "openai":
        if config.remote_engine:
            raise SettingsError("engine openai asks its own server; remote_engine must be false")
        from vlm.upstream.compose import upstream_pipeline

        return upstream_pipeline(options, image_limits(config), config.image_deadline_s)
    check_storage(options)
    if config.broker or config.store:
        from workers.cluster.redis_client import check_access

        check_access(broker=config.broker, store=config.store)
    options = pinned(options)
    spec: ModelSpec | ForeignSpec | None = _foreign_spec(options)
    if spec is None:
        options = options if config.remote_engine else settled(options)
        spec = _spec(options, config.variant)
    elif config.remote_engine:
        raise SettingsError("transformers runs this model, on one machine only; remote_engine must be false")
    return Pipeline(
        spec,
        build_preprocess(config),
        build_engine_client(config, options, spec),
        image_limits(config),
        image_deadline_s=config.image_deadline_s,
    )
