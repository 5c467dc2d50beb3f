"""Every family, by the `model_type` of a config.json."""

from __future__ import annotations

from difflib import get_close_matches

from llm.decoder_config import ConfigError
from vlm.families.base import Family, Json
from vlm.families.elsewhere import ELSEWHERE_BY_TYPE
from vlm.families.own_size import glm_ocr, lighton_ocr, mistral3, paddleocr_vl, qwen3_vl, qwen_vl
from vlm.families.packed import llava_next, llava_onevision
from vlm.families.tiled import gemma3, idefics3, internvl

FAMILIES: tuple[Family, ...] = (
    idefics3.FAMILY,
    internvl.FAMILY,
    gemma3.FAMILY,
    lighton_ocr.FAMILY,
    qwen_vl.QWEN2_VL,
    qwen_vl.QWEN2_5_VL,
    qwen3_vl.FAMILY,
    paddleocr_vl.FAMILY,
    mistral3.MISTRAL3,
    mistral3.PIXTRAL,
    glm_ocr.FAMILY,
    llava_next.FAMILY,
    llava_onevision.FAMILY,
)

BY_MODEL_TYPE: dict[str, Family] = {name: family for family in FAMILIES for name in family.model_types}


def find_family(config: Json) -> Family | None:
    family = BY_MODEL_TYPE.get(str(config.get("model_type")))
    return family if family is not None and family.claims(config) else None


def family_of(config: Json) -> Family:
    """Raises ConfigError, which names the model_type and what is known, for any other."""
    family = find_family(config)
    if family is None:
        raise ConfigError(unsupported(config))
    return family


def unsupported(config: Json) -> str:
    """One line for a model that no family claims: its model_type, and the engine that runs it or the nearest
    that work."""
    name = "".join(c for c in str(config.get("model_type", "")) if c.isalnum() or c in "_-.")[:40]
    if name in BY_MODEL_TYPE:
        kinds = BY_MODEL_TYPE[name].parts.items()
        parts = " and ".join(f"a {part} of type {' or '.join(types)}" for part, types in kinds)
        return f"model_type {name} is supported with {parts} alone"
    if elsewhere := ELSEWHERE_BY_TYPE.get(name):
        return f"model_type {name} is not supported by the native engine; {elsewhere.advice}"
    nearest = get_close_matches(name, BY_MODEL_TYPE, n=3, cutoff=0.5) or sorted(BY_MODEL_TYPE)
    return f"model_type {name or '(none)'} is not supported; the nearest that work: {', '.join(nearest)}"
