"""Reads a decoder out of a Hugging Face directory, strictly, and makes the backend that runs it.

Only safetensors are read and nothing from a checkpoint is executed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llm.backend.base import Backend
from llm.backend.decoder import DecoderWeights, LayerWeights
from llm.backend.torch_backend import TorchBackend
from llm.cost import kv_block_bytes
from llm.cost.exact_bytes import padded
from llm.decoder_config import ConfigError, DecoderConfig, TextNames, read_json_object
from llm.storage import storage_of

BackendName = Literal["auto", "torch", "native"]
AttentionName = Literal["auto", "torch", "triton"]

log = logging.getLogger(__name__)

# Buffers that older transformers saved; recomputed here.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")


class WeightsError(ValueError):
    """A checkpoint whose tensors do not fit its config; the text names the tensor."""


class DecoderCheckpoint:
    """Tensors of one or many safetensors files by name, read on demand."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._where: dict[str, Any] = {}
        for path in _weight_files(directory):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError):
                raise WeightsError("a weight file is missing or not readable as safetensors") from None
            names: list[str] = handle.keys()
            for name in names:
                if name in self._where:
                    raise WeightsError(f"the checkpoint holds {name} twice")
                self._where[name] = handle

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise WeightsError("the safetensors index has no weight_map")
    files = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in files):
        raise WeightsError("the safetensors index names a file outside the checkpoint")
    return [directory / name for name in files]


def load_weights(
    directory: Path,
    config: DecoderConfig,
    names: TextNames,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DecoderWeights:
    """Raises WeightsError for missing, unexpected or misshapen tensors, ConfigError for a broken index."""
    with ExitStack() as stack:
        checkpoint = DecoderCheckpoint(directory, stack)
        prefix = next((p for p in names.prefixes if f"{p}embed_tokens.weight" in checkpoint.names), None)
        if prefix is None:
            raise WeightsError("the checkpoint has no embed_tokens.weight")
        shapes = _expected_shapes(config, prefix)
        head = next((name for name in names.heads if name in checkpoint.names), None)
        if not config.tied_embeddings or head is not None:
            head = head or names.heads[0]
            shapes[head] = (config.vocab_size, config.d_model)
        # GLM's checkpoints have one layer more, which guesses a token ahead.
        ahead = (f"{prefix}layers.{config.num_layers}.",) if config.glm_names else ()
        _check_names(checkpoint, shapes, names.others + ahead)
        loaded = {name: _folded(config, name, checkpoint.tensor(name)).to(device, dtype) for name in shapes}
    return _assemble(config, prefix, loaded, None if head is None else loaded.pop(head))


def _folded(config: DecoderConfig, name: str, tensor: Tensor) -> Tensor:
    """What the config says of norms, queries, residuals and logits goes into the weights, in float32, before
    any rounding. The last norm takes the logits' scale: a tied head may not."""
    is_norm = name.endswith("norm.weight")
    if is_norm and config.norm_offset:
        tensor = tensor.float() + config.norm_offset
    scaled = ".q_norm." if config.qk_norm else ".q_proj."
    if config.query_scale != 1.0 and scaled in name:
        tensor = tensor.float() * config.query_scale
    if config.rope_pairs and (".q_proj." in name or ".k_proj." in name):
        tensor = tensor.unflatten(0, (-1, config.head_dim))[:, _halves(config)].flatten(0, 1)
    if config.residual_scale != 1.0 and (".o_proj." in name or ".down_proj." in name):
        tensor = tensor.float() * config.residual_scale
    if config.logit_scale != 1.0 and name.endswith(".norm.weight"):
        tensor = tensor.float() * config.logit_scale
    return tensor


def _halves(config: DecoderConfig) -> list[int]:
    """The order of a head's rows in which pairs of neighbours that turn lie half a head apart."""
    turned = config.ropes[0].dim
    still = range(turned, config.head_dim)
    half = len(still) // 2
    return [*range(0, turned, 2), *still[:half], *range(1, turned, 2), *still[half:]]


def _norm_names(config: DecoderConfig) -> dict[str, str]:
    """A layer's norms by their fields of LayerWeights. With four of them, "post_attention" means what it
    says; with two it names the one before the MLP."""
    if not config.post_norms:
        return {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    if config.glm_names:
        return {
            "attention_norm": "input_layernorm",
            "post_attention_norm": "post_self_attn_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "post_mlp_norm": "post_mlp_layernorm",
        }
    return {
        "attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }


def _gate_up(config: DecoderConfig) -> tuple[str, ...]:
    return ("gate_up_proj",) if config.glm_names else ("gate_proj", "up_proj")


def _expected_shapes(config: DecoderConfig, prefix: str) -> dict[str, tuple[int, ...]]:
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    linears = {
        "self_attn.q_proj": (q, c.d_model, c.qkv_bias),
        "self_attn.k_proj": (kv, c.d_model, c.qkv_bias),
        "self_attn.v_proj": (kv, c.d_model, c.qkv_bias),
        "self_attn.o_proj": (c.d_model, q, c.out_bias),
        **{f"mlp.{name}": (c.d_ff * 2 // len(_gate_up(c)), c.d_model, c.mlp_bias) for name in _gate_up(c)},
        "mlp.down_proj": (c.d_model, c.d_ff, c.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}embed_tokens.weight": (c.vocab_size, c.d_model),
        f"{prefix}norm.weight": (c.d_model,),
    }
    for i in range(c.num_layers):
        layer = f"{prefix}layers.{i}."
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
        shapes |= {f"{layer}{name}.weight": (c.d_model,) for name in _norm_names(c).values()}
        if c.qk_norm:
            shapes[f"{layer}self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (c.head_dim,)
    return shapes


def _check_names(
    checkpoint: DecoderCheckpoint, shapes: Mapping[str, tuple[int, ...]], others: tuple[str, ...]
) -> None:
    names = {n for n in checkpoint.names if not n.startswith(others) and not _IGNORED.search(n)}
    if missing := sorted(set(shapes) - names):
        raise WeightsError(f"the checkpoint lacks {missing[0]} ({len(missing)} missing)")
    if unexpected := sorted(names - set(shapes)):
        raise WeightsError(f"the checkpoint holds {unexpected[0]}, unknown here ({len(unexpected)} such)")
    for name, shape in shapes.items():
        if checkpoint.shape(name) != shape:
            raise WeightsError(f"{name} has shape {list(checkpoint.shape(name))} instead of {list(shape)}")


def _assemble(
    config: DecoderConfig, prefix: str, loaded: dict[str, Tensor], head: Tensor | None
) -> DecoderWeights:
    def joined(layer: str, names: tuple[str, ...], kind: str) -> Tensor | None:
        parts = [loaded.pop(f"{layer}{name}.{kind}", None) for name in names]
        return None if parts[0] is None else torch.cat([part for part in parts if part is not None])

    layers, norms = [], _norm_names(config)
    for i in range(config.num_layers):
        layer = f"{prefix}layers.{i}."
        qkv, out = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"
        gate_up, down = tuple(f"mlp.{name}" for name in _gate_up(config)), "mlp.down_proj"
        fused_qkv, fused_gate_up = joined(layer, qkv, "weight"), joined(layer, gate_up, "weight")
        assert fused_qkv is not None and fused_gate_up is not None
        layers.append(
            LayerWeights(
                qkv=fused_qkv,
                qkv_bias=joined(layer, qkv, "bias"),
                q_norm=loaded.pop(f"{layer}self_attn.q_norm.weight", None),
                k_norm=loaded.pop(f"{layer}self_attn.k_norm.weight", None),
                out=loaded.pop(f"{layer}{out}.weight"),
                out_bias=loaded.pop(f"{layer}{out}.bias", None),
                gate_up=fused_gate_up,
                gate_up_bias=joined(layer, gate_up, "bias"),
                down=loaded.pop(f"{layer}{down}.weight"),
                down_bias=loaded.pop(f"{layer}{down}.bias", None),
                **{field: loaded.pop(f"{layer}{name}.weight") for field, name in norms.items()},
            )
        )
    embedding = loaded.pop(f"{prefix}embed_tokens.weight")
    # A tied checkpoint may still store the head; as in transformers, a differing one wins.
    shared = head is None or (config.tied_embeddings and torch.equal(head, embedding))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=loaded.pop(f"{prefix}norm.weight"),
        lm_head=embedding if shared or head is None else head,
    )


def load_backend(
    directory: Path,
    config: DecoderConfig,
    names: TextNames,
    *,
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    backend: BackendName = "auto",
    weights: str = "auto",
    kv: str = "auto",
    attention: AttentionName = "auto",
) -> Backend:
    """The decoder of a checkpoint directory, whose family gives `config` and `names`, ready to execute plans.

    Exactly one of `num_blocks` and `kv_bytes` sizes the KV pool; on a GPU without either it takes what is
    free beside the weights. `auto` takes the native backend on a CPU where it runs, else torch with one
    logged notice. On the native backend `weights` and `kv` say how these are stored (`auto`: as `dtype`,
    float32 weights in bfloat16 where that loses nothing); arithmetic stays float32. Torch computes and
    stores in `dtype`; its KV may be int8 as well. Its `attention` is one Triton kernel over the paged pool
    where `auto` finds a GPU.

    Raises ConfigError, WeightsError, NativeUnavailable, or ValueError for bad arguments.
    """
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    if torch_dtype is None:
        raise ValueError("dtype must be one of float32, bfloat16, float16")
    if backend not in ("auto", "torch", "native"):
        raise ValueError("backend must be one of auto, torch, native")
    on_gpu = device.startswith("cuda")
    given = (num_blocks is not None) + (kv_bytes is not None)
    if given > 1 or not (given or on_gpu):
        raise ValueError("give either num_blocks or kv_bytes")
    if backend == "native" and device != "cpu":
        raise ValueError("the native backend runs on a CPU; backend must be torch or auto on another device")
    native = backend == "native" or (backend == "auto" and _native_fits(device, block_size))
    stored_weights, stored_kv = storage_of(dtype, weights, kv, native)

    def blocks_in(num_bytes: int) -> int:
        stored_dim = padded(config.head_dim) if native else None
        block_bytes = kv_block_bytes(
            config.num_layers, config.num_kv_heads, config.head_dim, block_size, stored_kv, stored_dim
        )
        if num_bytes < block_bytes:
            raise ValueError(
                f"a KV cache of {num_bytes} bytes holds no block: {block_size} tokens take {block_bytes}"
            )
        return num_bytes // block_bytes

    if kv_bytes is not None:
        num_blocks = blocks_in(kv_bytes)
    if block_size < 1 or (num_blocks is not None and num_blocks < 1):
        raise ValueError("the KV pool holds no block")
    if native:
        from llm.backend.native import NativeBackend

        assert num_blocks is not None
        return NativeBackend(
            config,
            load_weights(directory, config, names),
            num_blocks=num_blocks,
            block_size=block_size,
            weight_storage=stored_weights,
            kv_storage=stored_kv,
        )
    loaded = load_weights(directory, config, names, device=device, dtype=torch_dtype)
    if num_blocks is None:
        from llm.backend.cuda.kv_room import free_for_kv

        num_blocks = blocks_in(free_for_kv(loaded.embedding.device))
    kind: type[TorchBackend] = TorchBackend
    if attention == "triton" or (attention == "auto" and on_gpu):
        try:
            from llm.backend.cuda.paged_backend import PagedBackend
        except ModuleNotFoundError as missing:
            raise ValueError(
                f"attention on a GPU needs {missing.name}, not installed here: pip install 'vlm-serve[cuda]'"
            ) from None
        kind = PagedBackend
    return kind(config, loaded, num_blocks=num_blocks, block_size=block_size, int8_kv=stored_kv == "int8")


def _native_fits(device: str, block_size: int) -> bool:
    """Compiles the native backend where this is a CPU it may run on; says once why it can't."""
    if device != "cpu":
        return False
    from llm.backend.native_build import NativeUnavailable, load_library

    try:
        if block_size % 16:
            raise NativeUnavailable("the native backend needs a block size that is a multiple of 16")
        load_library()
    except NativeUnavailable as reason:
        log.warning("%s; torch takes its place", reason)
        return False
    return True


__all__ = ["ConfigError", "DecoderCheckpoint", "WeightsError", "load_backend", "load_weights"]
