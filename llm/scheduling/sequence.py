"""One request inside the engine: its sequences, their blocks, and how far their KV has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm.request import Request, TokenLogprob, VisualKey
from llm.sampling.beam import BeamSearch
from llm.sampling.draft import Drafter
from llm.sampling.sampler import SamplerState
from llm.scheduling.blocks import BlockContent, BlockKey
from llm.text.outputs import TextStream

if TYPE_CHECKING:
    from concurrent.futures import Future

    from llm.constraints.constrain import Matcher
    from llm.constraints.grammar import Compiled


class Sequence:
    """Tokens of one choice (or beam) and the blocks that hold their KV.

    Intervals over token positions: [0, num_prompt) prompt, [num_prompt, len(tokens)) generated,
    [0, num_computed) KV written, [num_computed, len(tokens)) to compute next. There is no prefill and no
    decode phase: a sequence whose last token alone is not computed decodes, any other catches up.
    Over blocks: [0, num_published) findable by others.
    """

    __slots__ = (
        "choice",
        "contents",
        "draft",
        "draft_limit",
        "draft_pause",
        "drafter",
        "logprobs",
        "matcher",
        "num_computed",
        "num_prompt",
        "num_published",
        "sampler",
        "score",
        "shares_tail",
        "table",
        "text",
        "tokens",
    )

    def __init__(self, choice: int, tokens: list[int], sampler: SamplerState, text: TextStream) -> None:
        self.choice = choice
        self.tokens = tokens
        self.num_prompt = len(tokens)
        self.sampler = sampler
        self.text = text
        self.num_computed = 0
        self.num_published = 0
        self.table: list[int] = []
        self.contents: list[BlockContent] = []
        self.shares_tail = False  # a fork: the block of position num_computed may have other holders
        self.draft: tuple[int, ...] = ()  # proposed tokens after the last one, verified in the same step
        self.drafter: Drafter | None = None
        self.draft_limit = 1  # longest draft of the next step
        self.draft_pause = 0  # steps without drafts left
        self.logprobs: list[TokenLogprob] = []  # kept for beams only; others stream theirs
        self.matcher: Matcher | None = None  # has accepted exactly the generated tokens
        self.score = 0.0  # sum of log-probabilities; beams only

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    def fork(self, choice: int, text: TextStream) -> Sequence:
        """A sequence with equal tokens on the same blocks; the caller retains them."""
        other = Sequence(choice, list(self.tokens), self.sampler.fork(choice), text)
        other.num_prompt = self.num_prompt
        other.num_computed = self.num_computed
        other.num_published = self.num_published
        other.table = list(self.table)
        other.contents = list(self.contents)
        other.logprobs = list(self.logprobs)
        other.matcher = None if self.matcher is None else self.matcher.fork()
        other.score = self.score
        return other

    def forget_blocks(self) -> list[int]:
        """Back to nothing computed; returns the blocks, which the caller releases."""
        table, self.table = self.table, []
        self.num_computed = self.num_published = 0
        self.shares_tail = False
        self.draft = ()
        return table


class SwappedBlocks:
    """Host copies of a preempted group's blocks: `tables[i]` indexes the copies, in member order."""

    __slots__ = ("count", "handle", "tables")

    def __init__(self, handle: Any, count: int, tables: list[list[int]]) -> None:
        self.handle = handle
        self.count = count
        self.tables = tables


class Group:
    """One request and the sequences that serve it, admitted and preempted as one.

    `order` ranks all requests: submission time, plus the ageing time for the batch class, so that a batch
    request goes before every interactive one submitted more than that later. Smaller goes first; the
    largest is preempted first. `priority` is the request's class, or that of a request it works for.
    """

    __slots__ = (
        "asked",
        "attached",
        "beam",
        "blocked_on",
        "claims",
        "considered",
        "encode_s",
        "encode_since",
        "first_scheduled_s",
        "first_token_s",
        "fork_at",
        "grammar",
        "held",
        "last_token_s",
        "members",
        "misfits",
        "missing_visual",
        "next_key",
        "num_cached",
        "num_completion",
        "num_longest",
        "num_scored",
        "order",
        "priority",
        "request",
        "rows_of",
        "saved_from",
        "spans",
        "spans_end",
        "submitted_s",
        "swapped",
        "width",
    )

    def __init__(self, request: Request, first: Sequence, order: tuple[float, int], now: float) -> None:
        params = request.params
        self.request = request
        self.members = [first]  # alive ones, in choice order
        self.order = order
        self.priority = request.priority
        self.beam: BeamSearch | None = None
        self.width = max(params.n, params.beam_width)  # slots reserved until the fork, alive members after
        self.fork_at: int | None = None  # prompt length once forked
        self.attached = True  # False: after a recompute, only members[0] has blocks until fork_at
        self.swapped: SwappedBlocks | None = None

        self.spans = request.prompt.spans
        self.spans_end = self.spans[-1].start + self.spans[-1].length if self.spans else 0
        self.rows_of = request.prompt.planned_rows()
        self.misfits: set[VisualKey] = set()  # keys that came with another number of rows once
        self.held: set[VisualKey] = set()
        self.asked: set[VisualKey] = set()  # asked for and not there yet

        # Why it waits; each can be checked again in constant time.
        self.considered = False
        self.blocked_on: BlockKey | None = None  # another group computes this block
        self.grammar: Future[Compiled] | None = None  # its constraint, until compiled
        self.saved_from: BlockKey | None = (
            None  # first block that was looked for beyond the pool; None: not yet
        )
        self.missing_visual: VisualKey | None = None
        self.next_key: BlockKey | None = None  # first block not found in the prefix cache
        self.claims: list[BlockKey] = []

        self.num_cached: int | None = None  # prompt tokens found at the first admission
        self.num_scored = 0  # prompt positions whose log-probabilities have been reported
        self.num_completion = 0
        self.num_longest = 0
        self.submitted_s = now
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = now
        self.encode_since: float | None = None
        self.encode_s = 0.0

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_slots(self) -> int:
        return self.width if self.fork_at is None else len(self.members)

    @property
    def scheduled_members(self) -> list[Sequence]:
        """Members that have blocks."""
        return self.members if self.attached else self.members[:1]
