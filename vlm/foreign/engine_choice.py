"""Which engine runs a model: this project's own, or transformers where no family claims it. Torch-free."""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from llm.text_config import ConfigError, read_json_object
from vlm.config import EngineOptions, SettingsError
from vlm.families.base import Json
from vlm.families.registry import find_family
from vlm.model_source import ModelSource

_NAMES = "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"


@cache
def transformers_types() -> frozenset[str]:
    """The model types that transformers has an AutoModelForImageTextToText for. Its table is read as text: to
    import it is to import torch."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        return frozenset()
    table = Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    try:
        tree = ast.parse(table.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == _NAMES for t in node.targets):
            pairs = [inner for inner in ast.walk(node.value) if isinstance(inner, ast.Tuple)]
            return frozenset(
                pair.elts[0].value
                for pair in pairs
                if pair.elts
                and isinstance(pair.elts[0], ast.Constant)
                and isinstance(pair.elts[0].value, str)
            )
    return frozenset()


def only_in_transformers(config: Json) -> bool:
    """No family claims a config.json, and transformers has a class for its model type."""
    return find_family(config) is None and str(config.get("model_type")) in transformers_types()


def takes_transformers(options: EngineOptions, source: ModelSource) -> bool:
    """Raises SettingsError where transformers is to run what it can't, or as it can't."""
    if options.engine in ("native", "openai") or source.tower:
        if options.engine == "transformers":
            raise SettingsError(
                "an open_clip tower has no class in transformers; engine must be native or auto"
            )
        return False
    try:
        config = read_json_object(source.directory / "config.json")
    except ConfigError:
        return False  # who reads the checkpoint says what is wrong with it
    if options.engine == "auto" and not only_in_transformers(config):
        return False
    name = str(config.get("model_type"))[:40]
    if name not in transformers_types():
        raise SettingsError(f"transformers has no class for images and text of model_type {name}")
    for setting in ("weights", "kv"):
        if getattr(options, setting) != "auto":
            raise SettingsError(
                f"{setting} must be auto where transformers runs the model: it has dtype alone"
            )
    return True


def notice(source: ModelSource) -> None:
    """One line for a model that transformers runs without being asked to."""
    config = read_json_object(source.directory / "config.json")
    print(
        f"vlm: no family claims model_type {str(config.get('model_type'))[:40]}; transformers runs the "
        "model, one token of one answer at a time",
        file=sys.stderr,
        flush=True,
    )
