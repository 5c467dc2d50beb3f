"""Muon for the network's inner matrices, AdamW for everything else, under one learning-rate scale."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

MUON_SCALE = 0.5  # Moonlight's 0.2 makes Muon as slow as AdamW at the same rate


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz iteration of Muon (Keller Jordan's quintic) on a stack (K, rows, cols)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-2, -1)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-2, -1) if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; an update's root mean square is MUON_SCALE times the learning rate."""

    def __init__(self, params: list[dict[str, object]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Matrices of one shape are updated in one stack."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
            nesterov: dict[nn.Parameter, Tensor] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                state["momentum"].lerp_(param.grad, 1 - group["momentum"])
                nesterov[param] = param.grad.lerp(state["momentum"], group["momentum"])
                shapes.setdefault(tuple(param.shape), []).append(param)
            for shape, params in shapes.items():
                stack = torch.stack([nesterov[param] for param in params])
                updates = orthogonalise(stack) * (MUON_SCALE * max(shape) ** 0.5)
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1 - group["lr"] * 0.01).sub_(update, alpha=group["lr"])


class Optimisers:
    """Both optimisers as one; every parameter group has a `part` whose rate is set apart."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        inner: dict[str, list[nn.Parameter]] = {}
        outer: dict[str, list[nn.Parameter]] = {}
        for name, param in named:
            into = inner if ".layers." in name and param.ndim == 2 else outer
            into.setdefault(part_of(name), []).append(param)
        self.muon = Muon([{"params": params, "part": part} for part, params in inner.items()], lr=0.0)
        self.adamw = torch.optim.AdamW(
            [{"params": params, "part": part} for part, params in outer.items()],
            lr=0.0,
            betas=(0.9, 0.98),
            weight_decay=0.0,
        )

    def step(self, rates: dict[str, float]) -> None:
        """One update; `rates` gives each part's learning rate."""
        for optimiser in (self.muon, self.adamw):
            for group in optimiser.param_groups:
                group["lr"] = rates[group["part"]]
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, object]:
        """Everything a resumed run needs."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, object]]) -> None:
        """The counterpart of state_dict."""
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def part_of(name: str) -> str:
    """tower (with the connector), decoder, or head."""
    if name.startswith(("patch_head", "token_head")):
        return "head"
    return "decoder" if ".text_model." in name else "tower"
