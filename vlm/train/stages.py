"""Named stages of training; each is a mix of documents, rates and weights."""

from dataclasses import dataclass, field


def _everything() -> dict[str, float]:
    return {"shapes": 0.12, "sign": 0.18, "label": 0.2, "receipt": 0.28, "invoice": 0.22}


@dataclass(frozen=True)
class Stage:
    """One stage. Rates are AdamW-sized; the last `decay` steps fall linearly to zero."""

    name: str
    steps: int
    rate: float = 1e-3
    tower_share: float = 0.5  # of the rate, for tower and connector; 0 freezes them
    tower_every: int = 2  # steps from one update of the tower to the next; in between it only runs forward
    patch_weight: float = 1.0
    batch: int = 4
    micro_batches: int = 4
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
        Stage("finish", steps=1500, rate=5e-4, decay=1500, raise_at=0.8),
    )
}
