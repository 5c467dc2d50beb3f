from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.batcher import ENCODE_FAILED, WRONG_COUNT, TileBatcher
from encoder.cache import VisualCache

TOKENS = 2  # a tile's tokens here


class FakeEncoder:
    """Rows that tell which tile they came from; tiles of value `poison` crash the whole call."""

    def __init__(self, poison: int | None = None) -> None:
        self.calls: list[list[int]] = []  # tiles of each image, per call
        self.poison = poison

    def __call__(self, images: Sequence[np.ndarray]) -> list[np.ndarray]:
        self.calls.append([len(tiles) for tiles in images])
        if any((tiles == self.poison).any() for tiles in images):
            raise RuntimeError("poison")
        return [np.repeat(tiles[:, 0, 0, :1], TOKENS, axis=0) for tiles in images]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tiles(count: int, first: int = 0) -> np.ndarray:
    return np.broadcast_to((np.arange(count) + first).astype(np.uint8)[:, None, None, None], (count, 2, 2, 3))


def batcher(encode: FakeEncoder, *, held: str = "", **options: object) -> TileBatcher:
    cache = VisualCache(1 << 20)
    for key in held:
        cache.hold(key)
    defaults = {"num_rows": lambda tiles: TOKENS * len(tiles), "max_tiles": 4, "concat": np.concatenate}
    return TileBatcher(encode, cache, **(defaults | options))  # type: ignore[arg-type]


def drain(subject: TileBatcher, limit: int = 1000) -> list[str]:
    finished: list[str] = []
    for _ in range(limit):
        if subject.due_in() != 0.0:
            return finished
        finished += subject.step().finished
        subject.check_integrity()
    raise AssertionError("the batcher never came to rest")


def test_images_share_a_batch_without_padding_in_order_of_arrival() -> None:
    encode = FakeEncoder()
    subject = batcher(encode, held="abc")
    for key, count in zip("abc", (1, 2, 1), strict=True):
        subject.put_tiles(key, tiles(count))
    assert subject.step().finished == ("a", "b", "c")
    assert encode.calls == [[1, 2, 1]]


def test_an_image_larger_than_a_batch_is_spread_over_steps_in_tile_order() -> None:
    subject = batcher(FakeEncoder(), held="a")
    subject.put_tiles("a", tiles(11))
    results = [subject.step() for _ in range(3)]
    assert [result.num_tiles for result in results] == [4, 4, 3]
    assert [result.finished for result in results] == [(), (), ("a",)]
    rows = subject.cache.get("a")
    assert rows is not None
    assert rows[:, 0].tolist() == np.repeat(np.arange(11), TOKENS).tolist()


def test_two_images_over_the_limit_end_and_a_small_one_passes_them() -> None:
    subject = batcher(FakeEncoder(), held="abc")
    subject.put_tiles("a", tiles(9))
    subject.put_tiles("b", tiles(9))
    subject.put_tiles("c", tiles(1))
    finished = drain(subject)
    assert finished[0] == "c" and sorted(finished) == ["a", "b", "c"]
    assert subject.counters.steps == 5  # 19 tiles, 4 at most in each: none is empty


def test_single_flight_encodes_a_key_once() -> None:
    encode = FakeEncoder()
    subject = batcher(encode, held="a")
    accepted = [subject.put_tiles("a", tiles(2)) for _ in range(20)]
    drain(subject)
    assert accepted == [True] + [False] * 19
    assert not subject.put_tiles("a", tiles(2)), "it is cached now"
    assert encode.calls == [[2]] and subject.counters.joined == 19


def test_interactive_goes_first_and_batch_tiles_never_join_it() -> None:
    encode = FakeEncoder()
    subject = batcher(encode, held="ab")
    subject.put_tiles("a", tiles(4), "batch")
    subject.put_tiles("b", tiles(1), "interactive")
    assert subject.step().finished == ("b",)
    assert encode.calls == [[1]]
    assert subject.step().finished == ("a",)


def test_batch_tiles_come_in_short_batches_and_interactive_ones_in_whole_ones() -> None:
    encode = FakeEncoder()
    subject = batcher(encode, held="ab", max_tiles=4, max_batch_tiles=1)
    subject.put_tiles("a", tiles(3), "batch")
    assert [subject.step().num_tiles for _ in range(2)] == [1, 1]
    subject.put_tiles("b", tiles(4))
    assert [subject.step().num_tiles for _ in range(2)] == [4, 1]


def test_aged_batch_work_gets_every_second_step() -> None:
    clock = Clock()
    subject = batcher(FakeEncoder(), clock=clock, ageing_s=5.0)
    for index in range(8):
        for name in (f"i{index}", f"b{index}"):
            subject.cache.hold(name)
        subject.put_tiles(f"i{index}", tiles(4), "interactive")
        subject.put_tiles(f"b{index}", tiles(4), "batch")
    young = [subject.step().finished[0] for _ in range(3)]
    clock.now = 5.0
    aged = [subject.step().finished[0] for _ in range(6)]
    assert [name[0] for name in young] == ["i", "i", "i"]
    assert [name[0] for name in aged] == ["b", "i", "b", "i", "b", "i"]


def test_batch_work_that_an_interactive_request_joins_becomes_interactive() -> None:
    subject = batcher(FakeEncoder(), held="abc")
    subject.put_tiles("a", tiles(4), "batch")
    subject.put_tiles("b", tiles(4), "batch")
    subject.put_tiles("c", tiles(4), "interactive")
    subject.put_tiles("b", tiles(4), "interactive")
    assert drain(subject) == ["b", "c", "a"]


def test_maximum_wait_collects_a_batch_and_then_gives_in() -> None:
    clock = Clock()
    encode = FakeEncoder()
    subject = batcher(encode, held="ab", clock=clock, max_wait_s=0.5)
    subject.put_tiles("a", tiles(1))
    assert subject.due_in() == 0.5 and subject.step().finished == ()
    clock.now = 0.2
    subject.put_tiles("b", tiles(3))
    assert subject.due_in() == 0.0, "the batch is full"
    assert subject.step().finished == ("a", "b")
    subject.cache.hold("c")
    subject.put_tiles("c", tiles(1))
    clock.now = 0.75
    assert subject.step().finished == ("c",)
    assert subject.due_in() is None


def test_what_nobody_holds_is_dropped_before_it_costs_anything() -> None:
    encode = FakeEncoder()
    subject = batcher(encode, held="ab")
    subject.put_tiles("a", tiles(3))
    subject.put_tiles("b", tiles(1))
    subject.cache.release("a")
    assert drain(subject) == ["b"]
    assert encode.calls == [[1]] and subject.counters.dropped == 1 and not subject.waiting("a")


def test_an_image_cancelled_halfway_stops_there_and_can_come_again() -> None:
    encode = FakeEncoder()
    subject = batcher(encode, held="a")
    subject.put_tiles("a", tiles(8))
    subject.step()
    subject.cache.release("a")
    assert subject.due_in() is None
    assert subject.step().num_tiles == 0
    subject.cache.hold("a")
    subject.put_tiles("a", tiles(8))
    assert drain(subject) == ["a"]
    rows = subject.cache.get("a")
    assert rows is not None and len(rows) == 8 * TOKENS


def test_a_crash_fails_only_the_image_that_causes_it() -> None:
    encode = FakeEncoder(poison=99)
    subject = batcher(encode, held="abc")
    subject.put_tiles("a", tiles(1))
    subject.put_tiles("b", tiles(1, first=99))
    subject.put_tiles("c", tiles(1))
    result = subject.step()
    assert result.finished == ("a", "c")
    assert result.failures == (("b", ENCODE_FAILED),)
    assert subject.failed("b") == ENCODE_FAILED and subject.failed("a") is None
    assert subject.due_in() is None, "a failure isn't tried again by itself"


def test_a_failure_is_remembered_while_it_is_held_and_asking_again_is_a_new_attempt() -> None:
    encode = FakeEncoder(poison=99)
    subject = batcher(encode, held="a")
    subject.put_tiles("a", tiles(1, first=99))
    subject.step()
    assert subject.failed("a") == ENCODE_FAILED
    encode.poison = None
    assert subject.put_tiles("a", tiles(1, first=99))
    assert subject.failed("a") is None
    assert subject.step().finished == ("a",)
    subject.cache.hold("b")
    subject.fail("b", ("bad_image", "the image can't be read"))
    assert subject.failed("b") == ("bad_image", "the image can't be read")
    subject.cache.release("b")
    subject.step()
    assert subject.failed("b") is None


@pytest.mark.parametrize("how", ["encoder", "told"])
def test_a_failure_ends_with_the_last_who_holds_its_key(how: str) -> None:
    """At once: whoever asks next may come before any other image does."""
    subject = batcher(FakeEncoder(poison=0), held="aa")
    if how == "encoder":
        subject.put_tiles("a", tiles(1))
        subject.step()
    else:
        subject.fail("a", ENCODE_FAILED)
    subject.cache.release("a")
    assert subject.failed("a") == ENCODE_FAILED
    subject.cache.release("a")
    assert subject.failed("a") is None
    subject.fail("a", ENCODE_FAILED)
    subject.cache.hold("a")
    assert subject.failed("a") is None, "nobody waited for it"


def test_an_entry_of_another_number_of_rows_than_the_tiles_give_is_encoded_anew() -> None:
    subject = batcher(FakeEncoder(), held="a")
    subject.cache.put("a", np.zeros((2 * TOKENS + 1, 1)))
    assert subject.put_tiles("a", tiles(2))
    assert drain(subject) == ["a"]
    rows = subject.cache.get("a")
    assert rows is not None and rows[:, 0].tolist() == [0, 0, 1, 1]
    assert not subject.put_tiles("a", tiles(2))


def test_another_number_of_rows_than_planned_fails_only_that_image() -> None:
    def short(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.zeros((len(one) * TOKENS - (len(one) == 3), 1)) for one in images]

    subject = batcher(short, held="ab")  # type: ignore[arg-type]
    subject.put_tiles("a", tiles(3))
    subject.put_tiles("b", tiles(1))
    result = subject.step()
    assert result.finished == ("b",) and result.failures == (("a", WRONG_COUNT),)


def test_a_batch_encoded_elsewhere_is_committed_later_whatever_the_order() -> None:
    encode = FakeEncoder()
    subject = batcher(encode, held="a")
    subject.put_tiles("a", tiles(6))
    first, second = subject.plan(), subject.plan()
    assert first is not None and second is not None and subject.plan() is None
    assert subject.due_in() is None, "all is under way: nothing to wake up for"
    late = subject.encode(second)
    assert subject.commit(second, late).finished == ()
    assert subject.commit(first, subject.encode(first)).finished == ("a",)
    rows = subject.cache.get("a")
    assert rows is not None
    assert rows[:, 0].tolist() == np.repeat(np.arange(6), TOKENS).tolist()


def test_an_empty_image_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one tile"):
        batcher(FakeEncoder()).put_tiles("a", tiles(0))


ACTION = st.one_of(
    st.tuples(
        st.just("put"), st.integers(0, 7), st.integers(1, 11), st.sampled_from(["interactive", "batch"])
    ),
    st.tuples(st.just("release"), st.integers(0, 7)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("tick"), st.integers(0, 9)),
)


@settings(deadline=None, max_examples=150)
@given(actions=st.lists(ACTION, max_size=40), poison=st.sampled_from([None, 0, 3, 10]))
def test_every_wanted_image_ends_and_nothing_leaks(actions: list[tuple], poison: int | None) -> None:
    """Any history: wanted keys finish or fail, rows are right, the cost is bounded, the books balance."""
    clock, encode = Clock(), FakeEncoder(poison)
    subject = batcher(encode, clock=clock, max_wait_s=0.5)
    held: set[str] = set()
    counts: dict[str, int] = {}
    for action in actions:
        if action[0] == "put":
            key = str(action[1])
            if key not in held:
                subject.cache.hold(key)
                held.add(key)
            counts.setdefault(key, action[2])
            subject.put_tiles(key, tiles(counts[key]), action[3])
        elif action[0] == "release" and str(action[1]) in held:
            held.remove(str(action[1]))
            subject.cache.release(str(action[1]))
        elif action[0] == "step":
            assert subject.step(action[1]).num_tiles <= action[1]
        elif action[0] == "tick":
            clock.now += action[1] / 10
        subject.check_integrity()
        subject.cache.check_integrity()
    clock.now += 10.0
    drain(subject, limit=200)
    for key in held:
        rows = subject.cache.get(key)
        bad = poison is not None and poison < counts[key]
        assert (rows is None) == bad == (subject.failed(key) is not None)
        if rows is not None:
            assert rows[:, 0].tolist() == np.repeat(np.arange(counts[key]), TOKENS).tolist()
    for key in held:
        subject.cache.release(key)
    subject.step()
    subject.cache.clear()
    assert not subject.num_waiting_tiles and subject.cache.num_bytes == 0 and subject.cache.num_holds == 0


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), target=st.integers(1, 9), aged=st.booleans()
)
def test_an_interactive_image_waits_a_bounded_number_of_steps(
    sizes: list[int], target: int, aged: bool
) -> None:
    """Any batch load: at most twice the steps that its own class needs, and one."""
    clock = Clock()
    subject = batcher(FakeEncoder(), clock=clock)
    for index, size in enumerate(sizes):
        subject.cache.hold(f"b{index}")
        subject.put_tiles(f"b{index}", tiles(size), "batch")
    subject.step()
    clock.now += 6.0 if aged else 0.0
    subject.cache.hold("target")
    subject.put_tiles("target", tiles(target), "interactive")
    steps = 0
    while "target" not in subject.cache:
        subject.step()
        steps += 1
    own = -(-target // subject.max_tiles)
    assert steps <= (2 * own + 1 if aged else own)


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    tile_s=st.floats(0.001, 20.0),
    budget_s=st.floats(0.01, 5.0),
    slower=st.floats(1.0, 10.0),
)
def test_a_step_takes_no_longer_than_its_budget_or_than_one_tile(
    sizes: list[int], tile_s: float, budget_s: float, slower: float
) -> None:
    """From the first one on, and again soon after the tower has become slower."""
    clock, cost = Clock(), tile_s

    def encode(images: Sequence[np.ndarray]) -> list[np.ndarray]:
        clock.now += cost * sum(len(one) for one in images)
        return [np.zeros((len(one) * TOKENS, 1)) for one in images]

    subject = batcher(encode, clock=clock, max_tiles=8, max_step_s=budget_s)  # type: ignore[arg-type]
    for index, size in enumerate(sizes):
        subject.cache.hold(f"{index}")
        subject.put_tiles(f"{index}", tiles(size))
    while subject.due_in() is not None:
        started, waiting = clock.now, subject.num_waiting_tiles
        num_tiles = subject.step().num_tiles
        assert clock.now - started <= max(budget_s, cost) * 1.001
        full = min(waiting, 8, max(1, int(budget_s / cost * 0.999)))
        assert num_tiles >= full or waiting == sum(sizes), "more fit into the step"
    cost = tile_s * slower
    for index in range(8):
        subject.cache.hold(f"slow {index}")
        subject.put_tiles(f"slow {index}", tiles(8))
        started = clock.now
        subject.step()
        drain(subject)
    subject.cache.hold("last")
    subject.put_tiles("last", tiles(8))
    started = clock.now
    subject.step()
    assert clock.now - started <= max(budget_s, cost) * 1.1


@settings(deadline=None, max_examples=100)
@given(target=st.integers(1, 9), stream=st.lists(st.integers(1, 9), min_size=60, max_size=60))
def test_a_batch_image_waits_a_bounded_time_under_endless_interactive_load(
    target: int, stream: list[int]
) -> None:
    """`ageing_s`, then at most twice the steps it needs by itself."""
    clock = Clock()
    subject = batcher(FakeEncoder(), held="b", clock=clock, ageing_s=3.0)
    subject.put_tiles("b", tiles(target), "batch")
    steps = 0
    for index, size in enumerate(stream):
        subject.cache.hold(f"i{index}")
        subject.put_tiles(f"i{index}", tiles(size), "interactive")
        clock.now += 0.25
        subject.step(4)
        steps += clock.now >= 3.0
        if "b" in subject.cache:
            break
    assert "b" in subject.cache
    assert steps <= 2 * -(-target // 4)
