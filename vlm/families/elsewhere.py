"""Known models that no family here claims, and the engine that runs each instead.

Those of transformers are run by this project's own server (`--engine transformers`), the others by vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vlm.families.base import Size

Engine = Literal["transformers", "vllm"]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    title: str
    model_types: tuple[str, ...]
    engine: Engine
    sizes: tuple[Size, ...] = ()

    @property
    def advice(self) -> str:
        """What to do with such a model, as part of a line."""
        if self.engine == "transformers":
            return f"{self.title} runs with --engine transformers"
        return f"{self.title} needs code that transformers lacks; vLLM serves it"


_NONCOMMERCIAL = "CC-BY-NC-4.0"

ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere("GLM-4.1V, GLM-4.5V, GLM-4.6V", ("glm4v", "glm4v_moe", "glm46v"), "transformers"),
    Elsewhere("Granite-Docling's new type", ("granite_docling",), "transformers"),
    Elsewhere(
        "Aya Vision",
        ("aya_vision",),
        "transformers",
        (Size("CohereLabs/aya-vision-8b", "8B", _NONCOMMERCIAL),),
    ),
    Elsewhere(
        "Cohere2 Vision",
        ("cohere2_vision",),
        "transformers",
        (Size("CohereLabs/command-a-vision-07-2025", "112B", _NONCOMMERCIAL),),
    ),
    Elsewhere(
        "Qwen3-VL with experts",
        ("qwen3_vl_moe",),
        "transformers",
        (Size("Qwen/Qwen3-VL-30B-A3B-Instruct", "30B", "Apache-2.0"),),
    ),
    Elsewhere("Gemma 4", ("gemma4", "gemma4_unified"), "transformers"),
    Elsewhere("Llama 3.2 Vision", ("mllama",), "transformers"),
    Elsewhere("Llama 4", ("llama4",), "transformers"),
    Elsewhere("PaliGemma", ("paligemma",), "transformers"),
    Elsewhere("Molmo 2", ("molmo2",), "transformers"),
    Elsewhere("LFM2-VL", ("lfm2_vl",), "transformers"),
    Elsewhere("Ovis2", ("ovis2",), "transformers"),
    Elsewhere("DeepSeek-VL2, DeepSeek-OCR", ("deepseek_vl_v2",), "vllm"),
    Elsewhere("Kimi-VL", ("kimi_vl",), "vllm"),
    Elsewhere("MiniCPM-V 2.6", ("minicpmv",), "vllm"),
    Elsewhere("Molmo", ("molmo",), "vllm"),
    Elsewhere("Ovis2.5", ("ovis2_5",), "vllm"),
    Elsewhere("Phi-3.5-vision", ("phi3_v",), "vllm"),
    Elsewhere("dots.ocr", ("dots_ocr",), "vllm"),
)

ELSEWHERE_BY_TYPE = {name: model for model in ELSEWHERE for name in model.model_types}
