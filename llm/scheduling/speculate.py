"""Speculation: guessed tokens ride along with a decode and are verified in the same pass.

Acceptance: at every position the token is drawn exactly as without a guess, with the position's own random
number; guesses are kept as long as the draw agrees with them. So the output is the same token by token,
greedy or sampled, whatever the draft is. For a draft that is certain of its guess this is rejection
sampling (Leviathan et al. 2023): a guess x is kept with probability p(x), else the draw is from p without x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llm.engine_config import PaysRule
from llm.sampling.draft import Drafter
from llm.scheduling.sequence import Group, Sequence

_PAUSE = 16  # tokens without guesses after guesses failed; then one is tried


class Speculation:
    """Gives guesses to running sequences, fewer or none where they were wrong or don't pay."""

    def __init__(self, make_draft: Callable[[], Drafter], num_draft: int, pays: PaysRule | None) -> None:
        self._make_draft = make_draft
        self._num_draft = num_draft
        self._pays = pays
        self.num_drafted = 0
        self.num_accepted = 0

    def propose(self, running: Iterable[Group], num_available: int, block_size: int) -> None:
        """Sets `draft` of every sequence that decodes in the coming step. `num_available`: free blocks;
        no group may lose blocks to a guess."""
        groups = list(running)
        batch = sum(len(group.members) for group in groups)
        worst = batch * (2 + self._num_draft // block_size)  # blocks, if each sequence grew by its guesses
        pays = self._pays is None or self._pays(batch, self._num_draft)
        for group in groups:
            for seq in group.members:
                seq.draft = ()
                if pays and num_available >= worst and _decodes(group, seq):
                    seq.draft = self._guess(group, seq)

    def observe(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Begins with one guess; twice as many after all were right, half after none was, at last a pause."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        if num_accepted == num_drafted:
            seq.draft_limit = min(2 * seq.draft_limit, self._num_draft)
        elif num_accepted == 0:
            seq.draft_limit //= 2
            if seq.draft_limit == 0:
                seq.draft_pause = _PAUSE

    def _guess(self, group: Group, seq: Sequence) -> tuple[int, ...]:
        if seq.draft_pause > 0:
            seq.draft_pause -= 1
            seq.draft_limit = 1
            return ()
        # The step adds one token more than it accepts.
        left = group.request.params.max_tokens - seq.num_generated - 1
        count = min(seq.draft_limit, left)
        if count <= 0:
            return ()
        if seq.drafter is None:
            seq.drafter = self._make_draft()
        return seq.drafter.propose(seq.tokens, count)


def _decodes(group: Group, seq: Sequence) -> bool:
    """Only its last token is not computed, and what the step draws joins this sequence alone."""
    return (
        group.beam is None
        and group.attached
        and seq.num_pending == 1
        and seq.num_generated > 0
        and seq.num_computed >= group.spans_end
    )
