"""KV blocks that outlive the pool: whatever a store has, has lost or gives late, answers are those of an
engine without one, and what it has is not computed."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from fake_backend import Harness, image_key, prompt_of, request_of
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import Prompt
from llm.scheduling.blocks import BlockKey


class MemoryStore:
    """`BlockStore` whose reads end when they are let."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.blocks: dict[BlockKey, bytes] = {}
        self.is_slow = is_slow
        self.is_full = False
        self.reads: list[tuple[list[BlockKey], Future[list[bytes]]]] = []

    def has(self, key: BlockKey) -> bool:
        return key in self.blocks

    def read(self, keys: list[BlockKey]) -> Future[list[bytes]]:
        future: Future[list[bytes]] = Future()
        self.reads.append((keys, future))
        if not self.is_slow:
            self.let()
        return future

    def let(self) -> None:
        for keys, future in self.reads:
            if not future.done():
                found = []
                for key in keys:
                    if key not in self.blocks:
                        break
                    found.append(self.blocks[key])
                future.set_result(found)

    def write(self, key: BlockKey, data: bytes) -> bool:
        if not self.is_full:
            self.blocks[key] = data
        return not self.is_full


def about(image: str, question: int, rows: int = 18) -> Prompt:
    """An image of `rows` visual tokens between two tokens and a question of its own."""
    return prompt_of([1, 2], (image, rows), [3, 4, 5 + question, 6])


def answers(harness: Harness, prompts: dict[str, Prompt]) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        harness.submit(request_of(name, prompt, max_tokens=6))
    harness.run()
    while harness.engine.has_work:
        harness.step()
    return {name: harness.answers[name, 0].token_ids for name in prompts}


PROMPTS = {
    "a": about("A", 1),
    "b": about("B", 1),
    "c": about("A", 2),
    "d": prompt_of([1, 2, 3, 4, 5, 6, 7, 8]),
}


def filled() -> MemoryStore:
    store = MemoryStore()
    answers(Harness(store=store), PROMPTS)
    return store


def test_what_another_engine_computed_is_read_and_not_computed() -> None:
    store = filled()
    later = Harness(store=store)
    expected = answers(Harness(), {"q": about("A", 3)})
    before = later.backend.num_tokens
    assert answers(later, {"q": about("A", 3)}) == expected
    stats = later.engine.stats()
    # positions 0 to 19 hold the image and what is before it: five whole blocks of four
    assert stats.kv_saved_read == 5 and stats.prefix_hit_tokens == 20
    assert later.backend.num_tokens - before == about("A", 3).num_tokens - 20 + 5
    assert not later.wants


def test_blocks_of_text_alone_are_not_kept() -> None:
    store = MemoryStore()
    answers(Harness(store=store), {"d": PROMPTS["d"]})
    assert not store.blocks


@settings(max_examples=60, deadline=None)
@given(
    lost=st.sets(st.integers(0, 30)),
    torn=st.sets(st.integers(0, 30)),
    num_blocks=st.integers(12, 64),
    questions=st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 3)), min_size=1, max_size=6),
)
def test_answers_do_not_depend_on_what_the_store_has_kept(
    lost: set[int], torn: set[int], num_blocks: int, questions: list[tuple[str, int]]
) -> None:
    store = filled()
    for number, key in enumerate(sorted(store.blocks)):
        if number in torn:
            store.blocks[key] = store.blocks[key][:-8]
        if number in lost:
            del store.blocks[key]
    prompts = {f"r{i}": about(image, question) for i, (image, question) in enumerate(questions)}
    assert answers(Harness(store=store, num_blocks=num_blocks), prompts) == answers(Harness(), prompts)


def test_who_waits_for_a_read_holds_up_nobody_and_goes_on_once_it_is_there() -> None:
    store = filled()
    store.is_slow = True
    harness = Harness(store=store)
    harness.submit(request_of("slow", about("A", 3), max_tokens=4))
    harness.submit(request_of("other", PROMPTS["d"], max_tokens=4))
    for _ in range(10):
        harness.step()
    assert "other" in harness.finished and "slow" not in harness.finished
    assert harness.engine.has_work
    store.let()
    harness.run()
    assert harness.engine.stats().kv_saved_read == 5


def test_two_that_want_the_same_blocks_read_them_once() -> None:
    store = filled()
    store.is_slow = True
    harness = Harness(store=store)
    for number in range(2):
        harness.submit(request_of(f"r{number}", about("A", 3 + number), max_tokens=4))
    harness.step()
    store.let()
    harness.run()
    assert len(store.reads) == 1 and harness.engine.stats().kv_saved_read == 5


def test_one_that_is_called_off_during_its_read_leaves_nothing() -> None:
    store = filled()
    store.is_slow = True
    harness = Harness(store=store)
    harness.submit(request_of("gone", about("A", 3), max_tokens=4))
    harness.step()
    harness.engine.cancel("gone")
    store.let()
    assert harness.engine.is_idle and not harness.engine.has_work
    assert answers(harness, {"q": about("A", 3)}) == answers(Harness(), {"q": about("A", 3)})


def test_a_read_that_would_take_longer_than_computing_is_not_begun() -> None:
    asked: list[tuple[int, int]] = []

    def rule(num_tokens: int, num_blocks: int) -> bool:
        asked.append((num_tokens, num_blocks))
        return False

    store = filled()
    harness = Harness(store=store, read_rule=rule)
    answers(harness, {"q": about("A", 3)})
    assert asked == [(20, 5)] and not store.reads


def test_a_read_that_fails_is_a_miss() -> None:
    class Broken(MemoryStore):
        def let(self) -> None:
            for _, future in self.reads:
                future.set_exception(OSError("gone"))

    store = Broken()
    store.blocks = filled().blocks
    harness = Harness(store=store)
    assert answers(harness, {"q": about("A", 3)}) == answers(Harness(), {"q": about("A", 3)})


def test_a_store_without_room_costs_nothing_else() -> None:
    store = MemoryStore()
    store.is_full = True
    harness = Harness(store=store)
    answers(harness, PROMPTS)
    stats = harness.engine.stats()
    assert stats.kv_saved_dropped > 0 and stats.kv_saved_written == 0 and not store.blocks


@pytest.mark.parametrize("namespace", ["", "other"])
def test_another_namespace_finds_nothing(namespace: str) -> None:
    from dataclasses import replace

    store = filled()
    harness = Harness(store=store)
    harness.submit(replace(request_of("q", about("A", 3), max_tokens=4), namespace=namespace))
    harness.run()
    assert (harness.engine.stats().kv_saved_read > 0) == (namespace == "")


def test_images_are_told_apart() -> None:
    store = filled()
    harness = Harness(store=store)
    answers(harness, {"q": about("C", 1)})
    assert harness.engine.stats().kv_saved_read == 0 and image_key("C") != image_key("A")
