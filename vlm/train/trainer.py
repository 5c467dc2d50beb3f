"""The training loop: curriculum, losses, checkpoints, validation; a run resumed equals one never stopped."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.train import batches
from vlm.train.batches import Batch
from vlm.train.checkpoint import load_state, save_state
from vlm.train.drawing.documents import HELD_OUT_SEED, KINDS
from vlm.train.drawing.tiles import IGNORE
from vlm.train.network import Network
from vlm.train.optim import Optimisers
from vlm.train.prompts import PromptBuilder
from vlm.train.stages import BEST, LAST, Stage

VALIDATION_SEED = HELD_OUT_SEED + 5 * 10**8
AVERAGE = 0.99  # a step's share of the running mean of the weights is 1 - AVERAGE


@dataclass
class Progress:
    """What a run has come to; saved with every checkpoint."""

    step: int = 0  # of the current stage
    stage: str = ""
    documents: int = 0
    seconds: float = 0.0
    best: float = -1.0
    levels: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    fluency: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    exact: dict[str, float] = field(default_factory=dict)
    loss: float = 0.0
    characters: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Losses of one batch; `right` tells for every wanted token whether the argmax hits it."""

    answer_loss: Tensor
    patch_loss: Tensor
    token_loss: Tensor
    right: Tensor
    character_accuracy: float | None


def _character_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """Cross entropy over legible patches, empty ones at a quarter weight; accuracy on the others."""
    kept = targets != IGNORE
    logits, targets = logits[kept], targets[kept]
    if not len(targets):
        return logits.sum() * 0.0, 1.0
    weight = torch.where(targets > 0, 1.0, 0.25)
    loss = (F.cross_entropy(logits, targets, reduction="none") * weight).sum() / weight.sum()
    full = targets > 0
    hits = (logits.argmax(-1) == targets)[full].float()
    return loss, float(hits.mean()) if len(hits) else 1.0


def run_batch(network: Network, batch: Batch, with_heads: bool, frozen_tower: bool) -> Outcome:
    """Forward pass of a batch."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen_tower):
        features = network.model.vision_model(batch.tiles)
        visual = network.model.connector(features)
    zero = torch.zeros(())
    patch_loss, token_loss, accuracy = zero, zero, None
    if with_heads:
        labelled = (batch.characters != IGNORE).flatten(1).any(1)
        targets = batch.characters[labelled]
        logits = network.patch_head(features[labelled]).float().view(*targets.shape, -1)
        patch_loss, accuracy = _character_loss(logits, targets)
        tiles, side, fold = len(targets), 8 // network.shape.fold, network.shape.fold
        folded = (
            targets.view(tiles, side, fold, side, fold, -1).transpose(2, 3).reshape(tiles, side * side, -1)
        )
        token_logits = network.token_head(visual[labelled]).float().view(*folded.shape, -1)
        token_loss, _ = _character_loss(token_logits, folded)
    layout = network.layout(batch.positions, batch.lengths, batch.masks)
    wanted = (batch.targets >= 0).nonzero()[:, 0]
    logits = network.decode(batch.tokens, visual[batch.uses].flatten(0, 1), layout, wanted).float()
    answers = batch.targets[wanted]
    answer_loss = F.cross_entropy(logits, answers)
    return Outcome(answer_loss, patch_loss, token_loss, logits.detach().argmax(-1) == answers, accuracy)


@torch.no_grad()
def validate(
    network: Network, builder: PromptBuilder, per_kind: int = 20, level: float = 1.0
) -> dict[str, float]:
    """Exact match per kind/question on fixed held-out documents.

    Greedy decoding gives the answer exactly where, teacher-forced, every argmax is right.
    """
    items = batches.validation_items(per_kind, level, VALIDATION_SEED)
    counts: dict[str, list[int]] = {}
    for start in range(0, len(items), 10):
        batch = batches.collate(items[start : start + 10], builder)
        right = run_batch(network, batch, with_heads=False, frozen_tower=True).right
        for name, first, last in batch.answers:
            counts.setdefault(name, []).append(int(right[first:last].all()))
    return {name: sum(hits) / len(hits) for name, hits in sorted(counts.items())}


def score(accuracies: dict[str, float]) -> float:
    """One figure for "best": the mean over document kinds of the mean over their question kinds."""
    kinds: dict[str, list[float]] = {}
    for name, value in accuracies.items():
        kinds.setdefault(name.split("/")[0], []).append(value)
    return sum(sum(values) / len(values) for values in kinds.values()) / len(kinds)


class Trainer:
    """A run: network, optimisers and progress, in a folder with its checkpoints and log.jsonl."""

    def __init__(
        self,
        network: Network,
        builder: PromptBuilder,
        folder: Path,
        run_seed: int = 0,
        bfloat16: bool = False,
    ) -> None:
        self.network, self.builder, self.folder, self.run_seed = network, builder, folder, run_seed
        self.bfloat16 = bfloat16  # matrix products in 16 bits; weights and sums stay in 32
        self.optimisers = Optimisers(network.named_parameters())
        self.average = {name: value.clone() for name, value in network.state_dict().items()}
        self.progress = Progress()
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, name: str) -> None:
        """Writes a checkpoint so that a crash leaves the old or the new one, never half of it."""
        state = {
            "network": self.network.state_dict(),
            "average": self.average,
            "optimisers": self.optimisers.state_dict(),
            "progress": asdict(self.progress),
            "run_seed": self.run_seed,
        }
        save_state(self.folder / name, state)

    def resume(self, path: Path) -> None:
        """Continues where a checkpoint stopped."""
        state = load_state(path)
        self.network.load_state_dict(state["network"])
        self.average = state["average"]
        self.optimisers.load_state_dict(state["optimisers"])
        self.progress = Progress(**state["progress"])
        self.run_seed = state["run_seed"]

    def rates(self, stage: Stage) -> dict[str, float]:
        step = self.progress.step
        rate = stage.rate * min(1.0, (step + 1) / stage.warmup)
        if step >= stage.steps - stage.decay:
            rate *= max(stage.steps - step, 0) / max(stage.decay, 1)
        return {"tower": rate * stage.tower_share, "decoder": rate, "head": rate}

    def step(self, stage: Stage) -> None:
        """One update from `stage.micro_batches` times `stage.batch` documents."""
        started = time.monotonic()
        progress = self.progress
        frozen = stage.tower_share == 0.0 or progress.step % stage.tower_every > 0
        for _ in range(stage.micro_batches):
            items = []
            for _ in range(stage.batch):
                items.append(
                    batches.draw_asked(
                        progress.documents, self.run_seed, stage.mix, progress.levels, self.builder
                    )
                )
                progress.documents += 1
            batch = batches.collate(items, self.builder)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bfloat16):
                outcome = run_batch(self.network, batch, stage.patch_weight > 0 and not frozen, frozen)
            loss = outcome.answer_loss + stage.patch_weight * (outcome.patch_loss + 0.5 * outcome.token_loss)
            (loss / stage.micro_batches).backward()
            self._follow(batch, outcome, stage)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimisers.step(self.rates(stage))
        self._average_in()
        progress.step += 1
        progress.seconds += time.monotonic() - started

    @torch.no_grad()
    def _average_in(self) -> None:
        torch._foreach_lerp_(
            list(self.average.values()), list(self.network.state_dict().values()), 1 - AVERAGE
        )

    def averaged(self) -> Network:
        """The network with the running mean of its weights: what is validated and exported."""
        network = Network(self.network.shape)
        network.load_state_dict(self.average)
        return network

    def _follow(self, batch: Batch, outcome: Outcome, stage: Stage) -> None:
        """Running means, and the curriculum: a kind's level rises once its token accuracy passes a mark."""
        progress = self.progress
        progress.loss += 0.02 * (float(outcome.answer_loss.detach()) - progress.loss)
        if outcome.character_accuracy is not None:
            progress.characters += 0.02 * (outcome.character_accuracy - progress.characters)
        for name, start, stop in batch.answers:
            kind = name.split("/")[0]
            hits = outcome.right[start:stop].float()
            progress.fluency[kind] += 0.004 * (float(hits[:-1].mean()) - progress.fluency[kind])
            before = progress.exact.get(name, 0.0)
            progress.exact[name] = before + 0.02 * (float(hits.min()) - before)
        for kind in KINDS:
            if progress.fluency[kind] > stage.raise_at and progress.levels[kind] < 1.0:
                progress.levels[kind] = round(progress.levels[kind] + 0.1, 1)
                progress.fluency[kind] = stage.raise_at - 0.05

    def run(self, stage: Stage, say: Callable[[str], None], save_seconds: float = 120.0) -> None:
        """Steps until the stage ends, with progress lines and checkpoints; validation keeps the best."""
        if self.progress.stage != stage.name:
            self.progress = replace(self.progress, stage=stage.name, step=0)
        saved = spoken = time.monotonic()
        documents = self.progress.documents
        while self.progress.step < stage.steps:
            self.step(stage)
            now = time.monotonic()
            if now - spoken > 30:
                say(self.line(stage, (self.progress.documents - documents) / (now - spoken)))
                spoken, documents = now, self.progress.documents
            if now - saved > save_seconds:
                self.save(LAST)
                saved = now
            if self.progress.step % stage.validate_every == 0 or self.progress.step == stage.steps:
                self._validate(say)
                spoken = time.monotonic()
        self.save(LAST)

    def _validate(self, say: Callable[[str], None]) -> None:
        accuracies = validate(self.averaged(), self.builder)
        figure = score(accuracies)
        say(
            f"validation {figure:.3f} "
            + " ".join(f"{name} {value:.2f}" for name, value in accuracies.items())
        )
        record = {
            "documents": self.progress.documents,
            "seconds": round(self.progress.seconds),
            "score": figure,
        }
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps({**record, "exact": accuracies, "levels": self.progress.levels}) + "\n")
        if figure > self.progress.best:
            self.progress.best = figure
            self.save(BEST)

    def line(self, stage: Stage, speed: float) -> str:
        """Progress on one line: loss, characters, level and exact match per kind, documents a second."""
        progress = self.progress
        kinds = []
        for kind in stage.mix:
            exact = " ".join(
                f"{n.split('/')[1]} {v:.2f}"
                for n, v in sorted(progress.exact.items())
                if n.startswith(f"{kind}/")
            )
            kinds.append(f"{kind}@{progress.levels[kind]:.1f} ({progress.fluency[kind]:.2f}) {exact}")
        head = f"{stage.name} {progress.step}/{stage.steps} {progress.seconds / 60:.1f} min"
        figures = f"loss {progress.loss:.3f} characters {progress.characters:.3f}"
        return f"{head} {speed:.1f} documents/s {figures} | " + " | ".join(kinds)
