"""A backend whose logits are a hash of the KV content it reads, and what goes with it.

Every position's KV entry is a hash of its input (token or visual row), its position and all entries before
it, read through the block table. A wrong block, a stale copy, a wrong visual row or a skipped position
changes every later logit. Milliseconds per test.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llm.backend.base import StepItem, StepPlan
from llm.constraints.constrain import Grammars
from llm.engine import Engine
from llm.engine_config import EngineConfig
from llm.request import (
    Delta,
    Event,
    Failed,
    Finished,
    ImageSpan,
    Prompt,
    Request,
    SamplingParams,
    VisualKey,
    WantVisual,
)
from llm.scheduling.saved_prefixes import BlockStore, ReadRule

U64 = np.uint64
MASK = 0xFFFFFFFFFFFFFFFF
VOCAB = 32
EOS = 31
IMAGE_TOKEN = 30


def mix(value: int) -> int:
    """splitmix64's finaliser."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _mix_array(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> U64(27))) * U64(0x94D049BB133111EB)
    return values ^ (values >> U64(31))


_WEIGHTS = np.array([mix(2 * i) | 1 for i in range(4096)], dtype=U64)  # by position


class FakeBackend:
    """Implements llm.backend.base.Backend over uint64 KV entries."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = VOCAB,
        max_positions: int = 512,
        whole_spans: bool = False,
    ) -> None:
        self.whole_spans = whole_spans
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.plans: list[StepPlan] = []
        self.num_tokens = 0
        self.num_swapped_out = self.num_swapped_in = 0
        self.fail_next = False
        # [2, positions], garbage at first: what a position's own input makes, and what all it sees makes
        garbage = [mix(10**9 + i) for i in range(2 * num_blocks * block_size)]
        self._kv = np.array(garbage, dtype=U64).reshape(2, -1)
        self._salts = np.array([mix(10**6 + i) for i in range(vocab_size)], dtype=U64)

    def execute(self, plan: StepPlan) -> np.ndarray:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("device lost")
        self.plans.append(plan)
        self.num_tokens += plan.num_tokens
        size = self.block_size
        sources = [self._kv[:, source * size : (source + 1) * size].copy() for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, sources, strict=True):
            self._kv[:, target * size : (target + 1) * size] = content
        rows = [row for item in plan.items for row in self._run(item)]
        return np.array(rows, dtype=np.float32).reshape(len(rows), self.vocab_size)

    def count_progress(self, ticks: np.ndarray) -> None: ...

    def swap_out(self, blocks: tuple[int, ...]) -> Any:
        self.num_swapped_out += len(blocks)
        return [self._kv[:, b * self.block_size : (b + 1) * self.block_size].copy() for b in blocks]

    def swap_in(self, handle: Any, blocks: tuple[int, ...]) -> None:
        self.num_swapped_in += len(blocks)
        for content, block in zip(handle, blocks, strict=True):
            self._kv[:, block * self.block_size : (block + 1) * self.block_size] = content

    kv_layout = "fake"

    def save_blocks(self, blocks: tuple[int, ...]) -> list[bytes]:
        return [self._kv[:, b * self.block_size : (b + 1) * self.block_size].tobytes() for b in blocks]

    def load_blocks(self, saved: list[bytes], blocks: tuple[int, ...]) -> None:
        for data, block in zip(saved, blocks, strict=True):
            content = np.frombuffer(data, U64).reshape(2, self.block_size)
            self._kv[:, block * self.block_size : (block + 1) * self.block_size] = content

    def _run(self, item: StepItem) -> list[np.ndarray]:
        end = item.start + len(item.token_ids)
        assert len(item.block_table) * self.block_size >= end, "the block table does not cover the chunk"
        assert len(set(item.block_table)) == len(item.block_table), "a block twice in one table"
        inputs = [mix(token) for token in item.token_ids]
        for visual in item.visuals:
            for index, row in enumerate(np.asarray(visual.rows)):
                inputs[visual.start + index] = mix(int.from_bytes(row.tobytes()[:8], "little"))
        slots = np.array(
            [block * self.block_size + i for block in item.block_table for i in range(self.block_size)]
        )[:end]
        own = [mix(value + 31 * (item.start + index)) for index, value in enumerate(inputs)]
        self._kv[0, slots[item.start :]] = own
        entries = self._kv[1, slots] * _WEIGHTS[:end]
        digest = int(entries[: item.start].sum(dtype=U64))
        together = {p: span for span in item.whole for p in range(*span)}
        rows = []
        for index, mine in enumerate(own):
            position = item.start + index
            seen = digest
            if position in together:
                first, last = together[position]
                assert last <= end, "half a span"
                before = (self._kv[1, slots[:first]] * _WEIGHTS[:first]).sum(dtype=U64)
                seen = int(before) ^ mix(int(self._kv[0, slots[first:last]].sum(dtype=U64)))
            entry = mix(seen ^ mine)
            self._kv[1, slots[position]] = entry
            digest = (digest + entry * int(_WEIGHTS[position])) & MASK
            if len(inputs) - index <= item.num_logits:
                rows.append(self._logits(digest))
        return rows

    def _logits(self, digest: int) -> np.ndarray:
        mixed = _mix_array(self._salts ^ U64(mix(digest)))
        return ((mixed >> U64(40)).astype(np.float64) / 2.0**24 * 8.0 - 4.0).astype(np.float32)


def reference_logits(prompt: Prompt, token_ids: list[int], whole_spans: bool = False) -> np.ndarray:
    """float32 [len(token_ids), vocab]: logits after each position, in one pass without engine or sharing.
    `token_ids` starts with the prompt."""
    backend = FakeBackend(num_blocks=1, block_size=len(token_ids), max_positions=4096)
    whole = tuple((s.start, s.start + s.length) for s in prompt.spans) if whole_spans else ()
    item = StepItem(tuple(token_ids), 0, (0,), len(token_ids), _all_visuals(prompt), whole)
    return backend.execute(StepPlan((item,)))


def _all_visuals(prompt: Prompt) -> tuple[Any, ...]:
    from llm.backend.base import VisualSlice

    return tuple(
        VisualSlice(s.start, visual_rows(s.key, s.offset + s.length)[s.offset :]) for s in prompt.spans
    )


def visual_rows(key: VisualKey, count: int) -> np.ndarray:
    """float64 [count, 2], different for every key and row."""
    seed = int.from_bytes(str(key).encode()[-8:], "little")
    return np.array([[mix(seed * 1009 + i) % 10**12, i] for i in range(count)], dtype=np.float64)


class FakeVisuals:
    """Implements llm.visuals.VisualSource; `put` plays the encoder."""

    def __init__(self) -> None:
        self.rows: dict[VisualKey, np.ndarray] = {}
        self.holds: Counter[VisualKey] = Counter()
        self.failures: dict[VisualKey, tuple[str, str]] = {}
        self.num_puts = 0

    def get(self, key: VisualKey) -> np.ndarray | None:
        return self.rows.get(key)

    def hold(self, key: VisualKey) -> None:
        self.holds[key] += 1

    def release(self, key: VisualKey) -> None:
        assert self.holds[key] > 0, "released more often than held"
        self.holds[key] -= 1
        if not self.holds[key]:
            del self.holds[key]

    def drop(self, key: VisualKey) -> None:
        self.rows.pop(key, None)

    def failed(self, key: VisualKey) -> tuple[str, str] | None:
        return self.failures.get(key)

    def put(self, key: VisualKey, count: int) -> None:
        self.num_puts += 1
        self.rows[key] = visual_rows(key, count)

    def evict_unheld(self) -> None:
        for key in [key for key in self.rows if not self.holds[key]]:
            del self.rows[key]


class _BytesDecoder:
    def __init__(self, table: tuple[bytes, ...]) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: tuple[int, ...]) -> str:
        return self._utf8.decode(b"".join(self._table[i] for i in token_ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteTokens:
    """Implements llm.text.outputs.TokenText: one byte string per id; by default id 0 is "a"."""

    strips_first_space = False

    def __init__(self, table: tuple[bytes, ...] | None = None) -> None:
        self.table = table or tuple(chr(97 + i).encode() for i in range(VOCAB))

    def decoder(self, skip_special: bool | None = None) -> _BytesDecoder:
        return _BytesDecoder(self.table)

    def text(self, token_ids: tuple[int, ...] | list[int]) -> str:
        decoder = self.decoder()
        return decoder.push(tuple(token_ids)) + decoder.flush()


class FakeClock:
    """Seconds that pass only when told, or by `tick` with every reading."""

    def __init__(self, tick: float = 0.0) -> None:
        self.now = 0.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


class Answer:
    """What the events of one choice add up to."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[Any] = []
        self.reason: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Answer) and self.__dict__ == other.__dict__

    def __repr__(self) -> str:
        return f"Answer({self.text!r}, {self.reason})"


class Harness:
    """An engine on fakes. Images are encoded as soon as they are wanted, unless `encodes` is False."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        encodes: bool = True,
        clock: Callable[[], float] | None = None,
        tokens: ByteTokens | None = None,
        eos: frozenset[int] = frozenset({EOS}),
        max_positions: int = 512,
        vocab_size: int = VOCAB,
        grammars: Grammars | None = None,
        checks: bool = True,
        whole_spans: bool = False,
        store: BlockStore | None = None,
        read_rule: ReadRule = lambda num_tokens, num_blocks: True,
        **settings: Any,
    ) -> None:
        settings.setdefault("step_stretch", None)
        settings.setdefault("min_chunk_tokens", 1)
        self.backend = FakeBackend(num_blocks, block_size, vocab_size, max_positions, whole_spans)
        self.visuals = FakeVisuals()
        self.tokens = tokens or ByteTokens()
        self.encodes = encodes
        self.checks = checks
        self.rows_of: dict[VisualKey, int] = {}
        self.wants: list[WantVisual] = []
        self.events: list[Event] = []
        self.answers: dict[tuple[str, int], Answer] = {}
        self.finished: dict[str, Finished] = {}
        self.failed: dict[str, Failed] = {}
        config = EngineConfig(**settings)
        clock = clock or FakeClock(0.001)
        self.engine = Engine(
            self.backend, self.visuals, config, self.tokens, eos, clock, grammars, store, read_rule
        )

    def submit(self, request: Request) -> None:
        self.engine.submit(request)
        for span in request.prompt.spans:
            end = span.offset + span.length
            self.rows_of[span.key] = max(self.rows_of.get(span.key, 0), end)

    def step(self) -> list[Event]:
        events = self.engine.step()
        if self.checks:
            self.engine.check_integrity()
        for event in events:
            self._note(event)
        self.events += events
        return events

    def encode(self, key: VisualKey) -> None:
        if self.visuals.get(key) is None:
            self.visuals.put(key, self.rows_of[key])

    def run(self, max_steps: int = 20_000) -> None:
        """Steps until idle; fails if the engine stops making progress."""
        for _ in range(max_steps):
            if self.engine.is_idle:
                return
            assert self.engine.has_work, "requests are left but nothing can run"
            self.step()
        raise AssertionError("still not idle")

    def answer(self, request_id: str, choice: int = 0) -> Answer:
        return self.answers[request_id, choice]

    def assert_clean(self) -> None:
        """Idle, nothing held, every counter back to zero."""
        stats = self.engine.stats()
        assert self.engine.is_idle and not self.engine.has_work
        assert stats.running == stats.waiting == stats.kv_blocks_held == stats.visuals_missing == 0
        assert not self.visuals.holds
        assert self.engine._scheduler.prefixes.num_claims == 0
        self.engine.check_integrity()

    def _note(self, event: Event) -> None:
        if isinstance(event, WantVisual):
            self.wants.append(event)
            if self.encodes:
                self.encode(event.key)
        elif isinstance(event, Delta):
            answer = self.answers.setdefault((event.request_id, event.choice), Answer())
            answer.token_ids += event.token_ids
            answer.text += event.text
            answer.logprobs += event.logprobs
        elif isinstance(event, Finished):
            self.answers[event.request_id, event.choice].reason = event.reason
            if event.usage is not None:
                self.finished[event.request_id] = event
        elif isinstance(event, Failed):
            self.failed[event.request_id] = event


def image_key(name: str) -> VisualKey:
    return VisualKey(name.rjust(64, "0"))


def text_prompt(*token_ids: int) -> Prompt:
    return Prompt(tuple(token_ids))


def prompt_of(*parts: list[int] | tuple[str, int]) -> Prompt:
    """Text as lists of ids, images as (name, number of visual tokens)."""
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
        else:
            spans.append(ImageSpan(len(ids), part[1], image_key(part[0]), 0))
            ids += [IMAGE_TOKEN] * part[1]
    return Prompt(tuple(ids), tuple(spans))


def request_of(request_id: str, prompt: Prompt, priority: str = "interactive", **params: Any) -> Request:
    namespace = params.pop("namespace", "")
    params.setdefault("max_tokens", 8)
    params.setdefault("ignore_eos", True)
    return Request(request_id, prompt, SamplingParams(**params), priority, namespace)  # type: ignore[arg-type]


def renamed(request: Request, request_id: str) -> Request:
    return replace(request, id=request_id)


def greedy(prompt: Prompt, max_tokens: int, eos: int | None = None, whole_spans: bool = False) -> list[int]:
    """The plain reference: recompute everything for every token."""
    ids = list(prompt.token_ids)
    for _ in range(max_tokens):
        ids.append(int(reference_logits(prompt, ids, whole_spans)[-1].argmax()))
        if ids[-1] == eos:
            break
    return ids[prompt.num_tokens :]
