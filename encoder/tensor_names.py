"""Where a checkpoint keeps the encoder's tensors, as data that families write. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from encoder.tensor_files import CheckpointError

TEMPORAL_PATCH = 2  # frames in a patch of towers that see videos

Fold = Literal[
    "none",
    "positions",
    "bucketed_positions",
    "layer_scale",
    "plus_one",
    "transpose",
    "channel_major",
    "sum_temporal",
    "class_token",
    "output_scale",
    "convolution",
]
"""What is done to a parameter while it is loaded, in float32: a batch axis in front of a position table, the
table's rows by Idefics3's buckets, rows times those of `Source.by`, a norm's offset, [in, out] turned to
[out, in], a cell's inputs from channel by channel to patch by patch, a patch's two frames as one, since a
still image shows both the same, two axes in front of a vector, the connector's factor on visual
tokens, a convolution over a cell as a matrix. `encoder.encoder_weights` does it."""


@dataclass(frozen=True, slots=True)
class Source:
    """The checkpoint's tensors that make one of ours: joined by rows, then folded."""

    names: tuple[str, ...]
    fold: Fold = "none"
    by: str = ""  # of "layer_scale": a tensor with a factor for each row

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.names, self.by) if self.by else self.names

    def prefixed(self, prefix: str) -> Source:
        by = prefix + self.by if self.by else ""
        return Source(tuple(prefix + name for name in self.names), self.fold, by)


@dataclass(frozen=True, slots=True)
class VisualNames:
    """Tower and connector of a family, by our parameters' names.

    Checkpoints of several generations differ in their prefixes alone: each tuple is tried in order.
    """

    tower_prefixes: tuple[str, ...]
    connector_prefixes: tuple[str, ...]
    tower: Mapping[str, Source] = field(repr=False)
    connector: Mapping[str, Source] = field(repr=False)
    text_prefixes: tuple[str, ...]
    beside: Mapping[str, Source] = field(default_factory=dict, repr=False)  # the connector's, elsewhere
    beside_prefixes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()  # beginnings, behind the tower's prefix, of tensors that nothing reads

    def is_visual(self, name: str) -> bool:
        """Whatever isn't the decoder's belongs to the encoder, so that no name falls between the two."""
        if self.unused and name.startswith(tuple(p + u for p in self.tower_prefixes for u in self.unused)):
            return False
        if name.startswith((*self.tower_prefixes, *self.connector_prefixes)):
            return True
        return not name.startswith(self.text_prefixes)

    def fits(self, names: Collection[str]) -> bool:
        probe = _probe(self.tower)
        return any(prefix + probe in names for prefix in self.tower_prefixes)

    def resolve(self, names: Iterable[str]) -> tuple[dict[str, Source], dict[str, Source]]:
        """(tower, connector) with whole names, as a checkpoint of these tensors spells them.

        Raises CheckpointError where no prefix fits.
        """
        present = frozenset(names)
        connector = _prefixed(self.connector, self.connector_prefixes, present)
        if self.beside:
            connector |= _prefixed(self.beside, self.beside_prefixes, present)
        return _prefixed(self.tower, self.tower_prefixes, present), connector


def layout_of(layouts: Sequence[VisualNames], names: Collection[str]) -> VisualNames:
    """The layout that a checkpoint of these tensors has; the first where none fits, for its errors."""
    return next((layout for layout in layouts if layout.fits(names)), layouts[0])


def _probe(sources: Mapping[str, Source]) -> str:
    return next(iter(sources.values())).names[0]


def _prefixed(
    sources: Mapping[str, Source], prefixes: tuple[str, ...], present: frozenset[str]
) -> dict[str, Source]:
    probe = _probe(sources)
    prefix = next((p for p in prefixes if p + probe in present), None)
    if prefix is None:
        raise CheckpointError(f"the checkpoint lacks {prefixes[0]}{probe}")
    return {ours: source.prefixed(prefix) for ours, source in sources.items()}
