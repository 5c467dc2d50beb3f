"""How much of a GPU's memory KV may take."""

from __future__ import annotations

import torch

FREE_SHARE = 0.9  # of what the weights leave; the rest is for activations, graphs and visual tokens


def free_for_kv(device: torch.device) -> int:
    """Bytes."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * FREE_SHARE)
