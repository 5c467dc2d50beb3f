"""Bytes and FLOPs of a decoder. Torch-free, and the one owner of these products.

Admission, the swap rule, the API's estimate and the planner all call these functions. Sizes are
bytes, times are seconds; a `DecoderShape` comes from any Hugging Face `config.json`.
"""

from llm.cost.exact_bytes import (
    WeightBytes,
    kv_block_bytes,
    kv_element_bytes,
    native_weight_bytes,
    stored_precision,
)
from llm.cost.machine import Machine, Precision
from llm.cost.memory import (
    InferenceLedger,
    activation_bytes,
    inference_ledger,
    kv_bytes,
    kv_bytes_per_token,
    kv_copies,
    kv_elements_per_layer,
    kv_shards,
    kv_share,
    logits_bytes,
    num_blocks,
    weight_bytes,
)
from llm.cost.parallel import (
    Parallel,
    device_kv_share,
    device_weight_bytes,
    kv_capacity_bytes,
    max_batch,
    parallel_decode_time,
)
from llm.cost.param_counts import CostError
from llm.cost.rules import (
    batch_at_ridge,
    expected_tokens,
    make_swap_rule,
    recompute_seconds,
    speculation_speedup,
    swap_seconds,
)
from llm.cost.shape import DecoderShape
from llm.cost.work import (
    Bound,
    Chunk,
    StepTime,
    Work,
    attention_flops,
    decode_time,
    decode_work,
    distinct_experts,
    linear_flops,
    prefill_time,
    prefill_work,
    step_time,
    step_work,
    time_work,
    weights_read,
)

__all__ = [
    "Bound",
    "Chunk",
    "CostError",
    "DecoderShape",
    "InferenceLedger",
    "Machine",
    "Parallel",
    "Precision",
    "StepTime",
    "WeightBytes",
    "Work",
    "activation_bytes",
    "attention_flops",
    "batch_at_ridge",
    "decode_time",
    "decode_work",
    "device_kv_share",
    "device_weight_bytes",
    "distinct_experts",
    "expected_tokens",
    "inference_ledger",
    "kv_block_bytes",
    "kv_bytes",
    "kv_bytes_per_token",
    "kv_capacity_bytes",
    "kv_copies",
    "kv_element_bytes",
    "kv_elements_per_layer",
    "kv_shards",
    "kv_share",
    "linear_flops",
    "logits_bytes",
    "make_swap_rule",
    "max_batch",
    "native_weight_bytes",
    "num_blocks",
    "parallel_decode_time",
    "prefill_time",
    "prefill_work",
    "recompute_seconds",
    "speculation_speedup",
    "step_time",
    "step_work",
    "stored_precision",
    "swap_seconds",
    "time_work",
    "weight_bytes",
    "weights_read",
]
