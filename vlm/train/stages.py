"""Named stages of training; each is a mix of documents, rates and weights."""

from dataclasses import dataclass, field

LAST, BEST = "last.safetensors", "best.safetensors"  # a run's checkpoints


def _everything() -> dict[str, float]:
    return {"shapes": 0.2, "sign": 0.2, "label": 0.18, "receipt": 0.24, "invoice": 0.18}


@dataclass(frozen=True)
class Stage:
    """One stage. Rates are AdamW-sized; the last `decay` steps fall linearly to zero."""

    name: str
    steps: int
    rate: float = 1e-3
    tower_share: float = 1.0  # of the rate, for tower and connector; 0 freezes them
    tower_every: int = 2  # steps from one update of the tower to the next; in between it only runs forward
    patch_weight: float = 1.0
    batch: int = 16
    micro_batches: int = 1
    warmup: int = 100
    decay: int = 0
    raise_at: float = 0.9
    validate_every: int = 250
    mix: dict[str, float] = field(default_factory=_everything)


STAGES = {
    stage.name: stage
    for stage in (
        Stage("join", steps=4000),
        Stage("decoder", steps=4000, tower_share=0.0, patch_weight=0.0),
        Stage("finish", steps=1700, decay=1700, raise_at=0.85),
    )
}
