"""One round of beam search on a group: its beams' logits in, forks of their blocks out."""

from __future__ import annotations

import numpy as np

from llm.request import FinishReason, RequestError, SamplingParams, TokenLogprob
from llm.sampling.beam import BeamSearch, Extension, Hypothesis
from llm.sampling.sampler import log_softmax, token_logprob
from llm.scheduling.blocks import BlockPool
from llm.scheduling.sequence import Group, Sequence
from llm.text.outputs import TextStream, TokenText


class BeamRounds:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def advance(self, group: Group, rows: list[np.ndarray]) -> bool:
        """Ranks all extensions, ends some, forks the rest. `rows[i]`: float32 [vocab] of member i.
        True when the search is over; the group's members are then as before. Raises RequestError."""
        beam, parents = group.beam, list(group.members)
        assert beam is not None
        group.fork_at = parents[0].num_prompt
        processed = [log_softmax(seq.sampler.process(row)) for seq, row in zip(parents, rows, strict=True)]
        ranked = beam.rank([seq.score for seq in parents], processed)
        if not ranked:
            raise RequestError("invalid_sampling_params", "These settings leave beam search without a token.")
        live = beam.live(ranked)
        num_top, num_tokens = group.request.params.logprobs, parents[0].num_generated + 1
        told = {ext: _told(rows[ext.parent], ext, num_top) for ext in ranked}
        for rank, ext in enumerate(ranked):
            if beam.is_end(ext, rank):
                beam.finish(_hypothesis(parents[ext.parent], ext, "stop", told[ext]))
        beam.settle(live[0].score if live else None, num_tokens)
        if not beam.is_done:
            group.members = self._fork(parents, live, told)
        elif num_tokens >= group.request.params.max_tokens or not beam.finished:
            self._cut(beam, parents, live, told)
        return beam.is_done

    def _cut(
        self,
        beam: BeamSearch,
        parents: list[Sequence],
        live: list[Extension],
        told: dict[Extension, list[TokenLogprob]],
    ) -> None:
        for ext in live:
            beam.finish(_hypothesis(parents[ext.parent], ext, "length", told[ext]))

    def _fork(
        self, parents: list[Sequence], live: list[Extension], told: dict[Extension, list[TokenLogprob]]
    ) -> list[Sequence]:
        """All forks before any token is added: a fork copies its parent as it was."""
        unused = set(range(len(parents)))
        members = []
        for ext in live:
            parent = parents[ext.parent]
            if ext.parent in unused:
                unused.discard(ext.parent)
                members.append(parent)
            else:
                members.append(parent.fork(0, parent.text))
                self._pool.retain(parent.table)
        for index in sorted(unused):
            self._pool.release(parents[index].forget_blocks())
        for seq, ext in zip(members, live, strict=True):
            seq.logprobs += told[ext]
            seq.tokens.append(ext.token_id)
            seq.sampler.observe(ext.token_id)
            seq.score = ext.score
            seq.shares_tail = seq.num_computed % self._pool.block_size != 0
        return members


def _told(row: np.ndarray, ext: Extension, num_top: int | None) -> list[TokenLogprob]:
    return [] if num_top is None else [token_logprob(row, ext.token_id, num_top)]


def _hypothesis(seq: Sequence, ext: Extension, reason: FinishReason, last: list[TokenLogprob]) -> Hypothesis:
    token_ids = (*seq.tokens[seq.num_prompt :], ext.token_id)
    return Hypothesis(token_ids, ext.score / len(token_ids), reason, (*seq.logprobs, *last))


def beam_text(
    hypothesis: Hypothesis, params: SamplingParams, tokens: TokenText, eos_ids: frozenset[int]
) -> tuple[str, FinishReason]:
    """Its text up to the first stop string, and why it ends."""
    stream, text = TextStream(tokens, params), ""
    for token_id in hypothesis.token_ids:
        if token_id in eos_ids and not params.ignore_eos:
            break
        piece, stopped = stream.push(token_id)
        text += piece
        if stopped:
            return text, "stop"
    rest, stopped = stream.flush()
    return text + rest, "stop" if stopped else hypothesis.reason
