"""How weights and the KV cache may be stored. Torch-free names; their bytes are in llm.cost."""

from __future__ import annotations

from typing import Literal, get_args

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
