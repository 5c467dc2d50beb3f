"""How weights and the KV cache may be stored. Torch-free names; their bytes are in llm.cost."""

from __future__ import annotations

from typing import Any, Literal, get_args

WeightStorage = Literal["float32", "bfloat16", "float16", "int8", "int4"]
KvStorage = Literal["float32", "bfloat16", "float16", "int8"]
# auto: as `dtype` says, and bfloat16 instead of float32 weights where that loses nothing
WeightOption = Literal["auto", "float32", "bfloat16", "float16", "int8", "int4"]
KvOption = Literal["auto", "float32", "bfloat16", "float16", "int8"]

WEIGHT_OPTIONS: tuple[WeightOption, ...] = get_args(WeightOption)
KV_OPTIONS: tuple[KvOption, ...] = get_args(KvOption)

INT4_GROUP = 32  # inputs of one output that share a scale


def head_storage(storage: WeightOption) -> WeightOption:
    """An int4 model's head is int8: one matrix of many, and the last rounding before the answer."""
    return "int8" if storage == "int4" else storage


def embedding_storage(storage: WeightOption, lossless: WeightOption) -> WeightOption:
    """A table of token embeddings, which a step reads by the row, has 16 bits beside quantised weights, the
    head that is tied to it included; else it is kept as loses nothing."""
    return "bfloat16" if storage in ("int8", "int4") else lossless


def storage_of(dtype: str, weights: str, kv: str, native: bool) -> tuple[WeightOption, KvStorage]:
    """What weights and KV are kept as. Raises ValueError for what the backend can't keep."""
    if weights not in WEIGHT_OPTIONS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_OPTIONS)}")
    if kv not in KV_OPTIONS:
        raise ValueError(f"kv must be one of {', '.join(KV_OPTIONS)}")
    if not native and weights not in ("auto", dtype):
        raise ValueError(f"{weights} weights need the native backend; torch keeps them in its dtype, {dtype}")
    if not native and kv not in ("auto", dtype, "int8"):
        raise ValueError(f"a {kv} KV cache needs the native backend; torch keeps it in {dtype} or int8")
    stored: Any = dtype if weights == "auto" and dtype != "float32" else weights
    cached: Any = dtype if kv == "auto" else kv
    return stored, cached
