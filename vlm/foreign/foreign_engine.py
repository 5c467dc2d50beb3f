"""The engine of a foreign model, from its options. Imports torch and transformers."""

from __future__ import annotations

import torch
from transformers.utils import logging as transformers_logging

from vlm.config import KV_CACHE_MB, MEBIBYTE, EngineOptions
from vlm.foreign.foreign_spec import ForeignSpec
from vlm.model_source import ModelSource, naming
from workers.anymodel.foreign_model import ForeignModel
from workers.anymodel.foreign_runner import ForeignRunner
from workers.local.progress import Progress


def build_foreign_runner(options: EngineOptions, progress: Progress | None = None) -> ForeignRunner:
    """Loads the checkpoint. Raises ConfigError where transformers can't."""
    source = ModelSource.parse(options.model)
    spec = ForeignSpec.load(source)
    progress = progress or Progress()
    progress.tick()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[options.dtype]
    with naming(source.directory):
        model = ForeignModel(
            source.directory,
            device=options.device,
            dtype=dtype,
            feature_bytes=options.visual_cache_mb * MEBIBYTE,
            prefix_bytes=(options.kv_cache_mb or KV_CACHE_MB) * MEBIBYTE if options.prefix_cache else 0,
            tick=progress.tick,
        )
    progress.tick()
    return ForeignRunner(
        model,
        spec.tokenizer,
        vocab_size=model.vocab_size,
        context_length=spec.context_length,
        max_running=options.max_running,
        about={
            "model": spec.name,
            "backend": f"transformers {model.name}",
            "dtype": options.dtype,
            "threads": options.threads,
            "max_running": options.max_running,
        },
    )
