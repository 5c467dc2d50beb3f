"""A pipeline whose engine is another server."""

from __future__ import annotations

import os
from pathlib import Path

from preprocess.limits import ImageLimits
from vlm.config import EngineOptions, SettingsError
from vlm.pipeline import Pipeline
from vlm.upstream.configured_spec import ConfiguredSpec
from vlm.upstream.openai_engine import OpenAIEngine
from workers.local.preprocess_inline import InlinePreprocess

KEY_VARIABLE = "VLM_ENGINE_KEY"


def upstream_pipeline(
    options: EngineOptions, limits: ImageLimits | None = None, image_deadline_s: float = 60.0
) -> Pipeline:
    """The engine is the server at `engine_url`; of the checkpoint no weights are read. Never imports torch.

    Raises SettingsError and ConfigError.
    """
    if not options.engine_url:
        raise SettingsError("engine openai needs the server's address: --engine-url http://HOST:PORT")
    spec = ConfiguredSpec.load(options.model, files="text", max_pixels=options.pixel_cap)
    engine = OpenAIEngine(options.engine_url, options.engine_model, read_key(options.engine_key_file))
    return Pipeline(spec, InlinePreprocess(), engine, limits, image_deadline_s, sends_chats=True)


def read_key(file: str) -> str:
    """Of the API: what the file holds, or the variable VLM_ENGINE_KEY. Raises SettingsError."""
    if not file:
        return os.environ.get(KEY_VARIABLE, "").strip()
    try:
        key = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"engine_key_file can't be read: {type(error).__name__}") from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError("engine_key_file must hold one key, of printable ASCII without spaces")
    return key
