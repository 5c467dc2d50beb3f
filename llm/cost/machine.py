"""The machine and the number formats that a cost is for."""

from __future__ import annotations

from dataclasses import dataclass

from llm.cost.param_counts import CostError


@dataclass(frozen=True, slots=True)
class Precision:
    """The byte ledger's three lines. Quantisation is an edit of one of them."""

    weight_bytes: float = 2.0  # per parameter: 4, 2, 1 or 0.5
    kv_bytes: float = 2.0  # per cached element
    compute_bits: int = 16  # format of the matrix multiply: 32, 16 or 8
    held_bytes: int = 0  # all that an engine holds for its weights, where that is known

    def __post_init__(self) -> None:
        if self.weight_bytes <= 0 or self.kv_bytes <= 0:
            raise CostError("an element must have more than 0 bytes")
        if self.compute_bits not in (32, 16, 8):
            raise CostError("matrix multiplies must be 32, 16 or 8 bits wide")


@dataclass(frozen=True, slots=True)
class Machine:
    """One accelerator (or this CPU). Rates are per second; efficiencies are of the rates above them."""

    name: str
    peak_flops: float  # FLOP/s, dense, 16-bit operands (32-bit on a CPU)
    bandwidth: float  # bytes/s of main memory
    memory_bytes: int
    peak_flops_8bit: float = 0.0  # 0: no faster than 16-bit
    compute_efficiency: float = 0.45  # of the peak, in prefill
    decode_efficiency: float = 0.0  # of the peak, in steps of decodes alone; 0: as in prefill
    tower_efficiency: float = 0.40  # of the peak, in the vision tower
    bandwidth_efficiency: float = 1.0  # MBU; 1 makes every time a floor
    overlap: float = 1.0  # share of the shorter of arithmetic and streaming that hides behind the longer
    step_overhead_s: float = 0.0  # launches and scheduling of a step, whatever its size
    layer_overhead_s: float = 0.0  # the same, per decoder layer
    cold_step_s: float = 0.0  # the same, for a step with part of a prompt: what it reads is in no cache yet
    tower_call_s: float = 0.0  # the same, per call of a tower
    tower_overhead_s: float = 0.0  # the same, per tower layer and call
    element_s: float = 0.0  # norms, activations, copies: per token, layer and channel of a decoder
    tower_element_s: float = 0.0  # the same, per patch, layer and channel of a tower
    cache_bytes: float = 0.0  # working sets up to this size stream at cache_bandwidth
    cache_bandwidth: float = 0.0
    host_bandwidth: float = 0.0  # bytes/s to host memory, one way
    link_bandwidth: float = 0.0  # bytes/s to a peer, one way
    collective_s: float = 6e-6  # latency of one all-reduce
    hop_s: float = 10e-6  # latency of one point-to-point transfer
    workspace_bytes: int = 2_000_000_000  # graphs, scratch, buffers, fragmentation
    preprocess_s_per_tile: float = 1.2e-3  # CPU seconds to resize and cut, per tile
    preprocess_s_per_megapixel: float = 0.0  # CPU seconds to decode, where they are known apart
    source: str = ""

    def __post_init__(self) -> None:
        if min(self.peak_flops, self.bandwidth) <= 0 or self.memory_bytes <= 0:
            raise CostError("a machine's rates and memory must be above 0")
        for share in (self.compute_efficiency, self.tower_efficiency, self.bandwidth_efficiency):
            if not 0 < share <= 1:
                raise CostError("an efficiency must be above 0 and at most 1")
        for share in (self.decode_efficiency, self.overlap):
            if not 0 <= share <= 1:
                raise CostError("a share must lie between 0 and 1")

    def rate(self, compute_bits: int = 16, decoding: bool = False) -> float:
        """FLOP/s that a decoder achieves."""
        efficiency = (
            self.decode_efficiency if decoding and self.decode_efficiency else self.compute_efficiency
        )
        return self.flops(compute_bits) * efficiency

    def flops(self, compute_bits: int = 16) -> float:
        """Peak FLOP/s at this width. 32-bit on an accelerator is not modelled: it runs at the 16-bit peak."""
        return self.peak_flops_8bit or self.peak_flops if compute_bits == 8 else self.peak_flops

    def ridge(self, compute_bits: int = 16) -> float:
        """FLOP per byte at which arithmetic and memory take equally long."""
        return self.flops(compute_bits) / self.bandwidth

    def overlap_of(self, num_bytes: float) -> float:
        """What hides when `num_bytes` are read in a step: nothing where they come from a cache."""
        return 0.0 if self.cache_bandwidth and num_bytes <= self.cache_bytes else self.overlap

    def stream_seconds(self, num_bytes: float) -> float:
        """Time to read `num_bytes` again in every step."""
        if self.cache_bandwidth and num_bytes <= self.cache_bytes:
            return num_bytes / self.cache_bandwidth
        return num_bytes / (self.bandwidth * self.bandwidth_efficiency)
