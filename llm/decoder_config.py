"""What a decoder is, read from a Hugging Face config: shapes, rope, biases. Torch-free.

Reference: transformers' LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig and modeling_rope_utils.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from llm.text_config import ConfigError, class_defaults, layer_kinds, read_json_object

RopeType = Literal["default", "linear", "llama3", "yarn"]

_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

_NULLABLE = ("num_key_value_heads", "head_dim", "sliding_window")

# What a config.json may leave out besides its sizes.
_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text", "granite", "glm_ocr_text")
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GEMMA3: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: inverse frequencies and the factor on cos and sin."""

    rope_type: RopeType
    theta: float
    dim: int  # rotated dimensions of a head
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scaling: float = 1.0  # multiplies cos and sin
    still: int = 0  # frequencies behind the others that don't turn: half a head's dimensions less `dim / 2`

    def inv_freq(self) -> np.ndarray:
        """float32 [dim / 2 + still], in radians per position."""
        return np.concatenate((self._turning(), np.zeros(self.still, np.float32)))

    def _turning(self) -> np.ndarray:
        base = np.float32(self.theta) ** (np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim))
        inv = (np.float32(1.0) / base).astype(np.float32)
        if self.rope_type == "linear":
            return (inv / np.float32(self.factor)).astype(np.float32)
        if self.rope_type == "llama3":
            return self._llama3(inv)
        if self.rope_type == "yarn":
            return self._yarn(inv)
        return inv

    def _llama3(self, inv: np.ndarray) -> np.ndarray:
        """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
        wavelength = 2 * math.pi / inv.astype(np.float64)
        low = self.original_max_positions / self.low_freq_factor
        high = self.original_max_positions / self.high_freq_factor
        smooth = (self.original_max_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * inv / self.factor + smooth * inv
        stretched = np.where(wavelength > low, inv / self.factor, inv)
        medium = (wavelength >= high) & (wavelength <= low)
        return np.where(medium, blended, stretched).astype(np.float32)

    def _yarn(self, inv: np.ndarray) -> np.ndarray:
        """NTK by parts (arXiv 2309.00071): a linear ramp between interpolated and original frequencies."""

        def dimension(rotations: float) -> float:
            ratio = self.original_max_positions / (rotations * 2 * math.pi)
            return self.dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((np.arange(self.dim // 2, dtype=np.float64) - low) / (high - low), 0, 1)
        return (inv / self.factor * ramp + inv * (1 - ramp)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A GQA decoder with a gated MLP. MHA and MQA are num_kv_heads' two ends."""

    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ropes: tuple[Rope, ...]
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # per layer: keys a query sees, itself included; 0 is all
    layer_ropes: tuple[int, ...]  # per layer: which of `ropes`
    activation: Activation = "silu"
    rope_pairs: bool = False  # neighbours turn together in the checkpoint; loading takes them apart
    glm_names: bool = False  # of norms in a checkpoint, and of the MLP's first two linears in one
    post_norms: bool = False  # a norm on what attention and MLP add, besides those before them
    norm_offset: float = 0.0  # added to the checkpoint's norm weights
    query_scale: float = 1.0  # on queries, besides the usual 1 / sqrt(head_dim)
    embedding_scale: float = 1.0  # on tokens' embeddings, not on visual tokens
    residual_scale: float = 1.0  # on what attention and MLP add
    logit_scale: float = 1.0
    whole_spans: bool = False  # positions of one image span see each other, later ones too
    rope_axes: tuple[int, ...] = ()  # per frequency: time, row or column (M-RoPE); empty: positions are one
    deepstack: int = 0  # so many first layers add rows of their own at visual tokens (Qwen3-VL)

    @property
    def row_width(self) -> int:
        """Channels of a visual token: what is embedded, then what each layer of `deepstack` adds."""
        return self.d_model * (1 + self.deepstack)

    @classmethod
    def from_hf(cls, text: Mapping[str, Any], *, tied: bool | None = None) -> DecoderConfig:
        """From a plain decoder's config.json, or from the decoder's part of another model's.

        `tied`, where given, wins over the part's own `tie_word_embeddings`. Raises ConfigError for what the
        decoder does not implement.
        """
        architecture = text.get("model_type")
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(f"decoder type {_shown(architecture)} is not supported (supported: {known})")
        given = {k: v for k, v in text.items() if v is not None or k in _NULLABLE}
        own = {"gemma3_text": _GEMMA3, "granite": _GRANITE}.get(architecture, {})
        values = _COMMON | own | class_defaults(architecture) | given
        if tied is not None:
            values["tie_word_embeddings"] = tied
        return _build(architecture, values)


@dataclass(frozen=True, slots=True)
class TextNames:
    """Where a checkpoint keeps the decoder's tensors: each tuple is tried in order."""

    prefixes: tuple[str, ...] = ("model.",)  # of `embed_tokens.weight`, `layers.N.` and `norm.weight`
    heads: tuple[str, ...] = ("lm_head.weight",)
    others: tuple[str, ...] = ()  # prefixes of what isn't the decoder's


def _build(architecture: str, values: Mapping[str, Any]) -> DecoderConfig:
    heads = _count(values, "num_attention_heads")
    kv_heads = _count(values, "num_key_value_heads") if values["num_key_value_heads"] else heads
    head_dim = _count(values, "head_dim") if values["head_dim"] else _count(values, "hidden_size") // heads
    if heads % kv_heads:
        raise ConfigError("num_attention_heads is not a multiple of num_key_value_heads")
    if head_dim % 2:
        raise ConfigError("an odd head_dim is not supported")
    is_gemma, is_glm = architecture == "gemma3_text", architecture == "glm_ocr_text"
    activation = values["hidden_activation" if is_gemma else "hidden_act"]
    supported = {"gelu_pytorch_tanh"} if is_gemma else {"silu", "swish"}
    if activation not in supported:
        names = ", ".join(sorted(supported))
        raise ConfigError(f"activation {_shown(activation)} is not supported (supported: {names})")
    for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if values.get(key):
            raise ConfigError(f"{key} is not supported")
    if values.get("quantization_config"):
        raise ConfigError("quantized checkpoints are not supported")
    windows = _windows(values)
    has_attention_bias = architecture != "mistral" and bool(values["attention_bias"])
    config = DecoderConfig(
        vocab_size=_count(values, "vocab_size"),
        d_model=_count(values, "hidden_size"),
        d_ff=_count(values, "intermediate_size"),
        num_layers=_count(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ropes=_ropes(values, head_dim),
        norm_eps=float(values["rms_norm_eps"]),
        max_positions=_count(values, "max_position_embeddings"),
        tied_embeddings=bool(values["tie_word_embeddings"]),
        qkv_bias=architecture == "qwen2" or has_attention_bias,
        out_bias=architecture in ("llama", "qwen3", "granite") and has_attention_bias,
        mlp_bias=architecture in ("llama", "granite") and bool(values["mlp_bias"]),
        qk_norm=architecture in ("qwen3", "gemma3_text"),
        windows=windows,
        layer_ropes=tuple(int(bool(window)) if is_gemma else 0 for window in windows),
        activation=_ACTIVATIONS[activation],
        rope_pairs=is_glm,
        glm_names=is_glm,
        post_norms=is_gemma or is_glm,
        norm_offset=1.0 if is_gemma else 0.0,
    )
    return replace(config, **_scales(architecture, values, head_dim))


def _scales(architecture: str, values: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The factors of Gemma 3 and Granite, by their fields of DecoderConfig."""
    if architecture == "gemma3_text":
        return {
            "query_scale": (head_dim / values["query_pre_attn_scalar"]) ** 0.5,
            "embedding_scale": _count(values, "hidden_size") ** 0.5,
        }
    if architecture == "granite":
        return {
            "query_scale": float(values["attention_multiplier"]) * head_dim**0.5,
            "embedding_scale": float(values["embedding_multiplier"]),
            "residual_scale": float(values["residual_multiplier"]),
            "logit_scale": 1 / float(values["logits_scaling"]),
        }
    return {}


def _windows(values: Mapping[str, Any]) -> tuple[int, ...]:
    kinds = layer_kinds({**values, "num_hidden_layers": _count(values, "num_hidden_layers")})
    if "linear" in kinds:
        raise ConfigError("layer_types is not supported (supported: full_attention, sliding_attention)")
    return tuple(int(values["sliding_window"]) if kind == "sliding" else 0 for kind in kinds)


def _ropes(values: Mapping[str, Any], head_dim: int) -> tuple[Rope, ...]:
    """One for every layer, or Gemma 3's two: of full layers and of sliding ones.

    `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before).
    """
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if values["model_type"] != "gemma3_text":
        return (_rope(given, values, head_dim),)
    full: Mapping[str, Any] = {"rope_theta": values.get("rope_theta") or 1e6} | dict(
        given.get("full_attention") or ({} if "sliding_attention" in given else given)
    )
    sliding = {"rope_theta": values.get("rope_local_base_freq") or 1e4} | dict(
        given.get("sliding_attention") or {}
    )
    return _rope(full, values, head_dim), _rope(sliding, values, head_dim)


def _rope(parameters: Mapping[str, Any], values: Mapping[str, Any], head_dim: int) -> Rope:
    given: dict[str, Any] = dict(parameters)
    rope_type: Any = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    theta = float(given.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0)
    partial = given.pop("partial_rotary_factor", None) or values.get("partial_rotary_factor") or 1.0
    if rope_type not in _ROPE_KEYS:
        raise ConfigError(
            f"rope type {_shown(rope_type)} is not supported (supported: {', '.join(_ROPE_KEYS)})"
        )
    if partial != 1.0 and (values["model_type"] != "glm_ocr_text" or rope_type != "default"):
        raise ConfigError("a partial rotary factor is not supported")
    given = {k: v for k, v in given.items() if v is not None}
    unknown = sorted(set(given) - _ROPE_KEYS[rope_type])
    if unknown:
        raise ConfigError(f"rope parameter {_shown(unknown[0])} is not supported for rope type {rope_type}")
    if rope_type == "default":
        turned = int(head_dim * partial)
        return Rope("default", theta, turned, still=(head_dim - turned) // 2)
    original = (
        values.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or values["max_position_embeddings"]
    )
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ()}
    for key in needed[rope_type]:
        if key not in given:
            raise ConfigError(f"rope type {rope_type} needs {key}")
    factor = float(given.get("factor") or values["max_position_embeddings"] / original)
    return Rope(
        rope_type=rope_type,
        theta=theta,
        dim=head_dim,
        factor=factor,
        original_max_positions=int(original),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 1.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        scaling=_yarn_scaling(given, factor) if rope_type == "yarn" else 1.0,
    )


def _yarn_scaling(given: Mapping[str, Any], factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        return magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return magnitude(1.0)


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{key} is not a positive whole number")
    return value


def _shown(value: object) -> str:
    """A config's own word in an error: short and printable."""
    return "".join(c for c in str(value) if c.isalnum() or c in "_-.")[:40] or "(none)"


__all__ = [
    "ARCHITECTURES",
    "ConfigError",
    "DecoderConfig",
    "Rope",
    "RopeType",
    "TextNames",
    "read_json_object",
]
