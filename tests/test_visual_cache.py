import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.cache import VisualCache


def entry(num_bytes: int) -> np.ndarray:
    return np.zeros(num_bytes, np.uint8)


def test_least_recently_used_leaves_first() -> None:
    cache = VisualCache(30)
    for key in "abc":
        cache.put(key, entry(10))
    cache.get("a")
    cache.put("d", entry(10))
    assert [key for key in "abcd" if key in cache] == ["a", "c", "d"]
    assert cache.counters.evictions == 1 and cache.num_bytes == 30


def test_held_entries_are_never_evicted_even_above_the_cap() -> None:
    cache = VisualCache(10)
    for key in "ab":
        cache.hold(key)
        cache.put(key, entry(10))
    assert cache.num_bytes == 20
    cache.release("a")
    assert "a" not in cache and "b" in cache and cache.num_bytes == 10


def test_an_entry_above_the_cap_serves_its_holders_and_pushes_nobody_out() -> None:
    cache = VisualCache(10)
    cache.put("small", entry(4))
    assert not cache.put("unheld", entry(11))
    assert "small" in cache
    cache.hold("large")
    assert cache.put("large", entry(11))
    assert cache.get("large") is not None
    cache.release("large")
    assert "large" not in cache


def test_holds_are_counted_and_may_come_before_the_entry() -> None:
    cache = VisualCache(0)
    cache.hold("a")
    cache.hold("a")
    assert cache.get("a") is None
    cache.put("a", entry(5))
    cache.release("a")
    assert cache.get("a") is not None
    cache.release("a")
    assert cache.get("a") is None and cache.num_holds == 0
    with pytest.raises(ValueError, match="release without a hold"):
        cache.release("a")


def test_one_query_is_one_query_however_often_the_entry_is_read() -> None:
    cache = VisualCache(10)
    assert not cache.query("a")
    cache.put("a", entry(1))
    assert cache.query("a")
    for _ in range(5):
        cache.get("a")
    assert (cache.counters.queries, cache.counters.hits) == (2, 1)


def test_clear_frees_all_that_is_free_now_and_the_rest_when_it_is_let_go() -> None:
    cache = VisualCache(100)
    cache.put("free", entry(7))
    cache.hold("held")
    cache.put("held", entry(9))
    assert cache.clear() == 7
    assert cache.get("held") is not None
    cache.release("held")
    assert len(cache) == 0 and cache.num_bytes == 0


def test_the_first_value_of_a_key_stays() -> None:
    cache = VisualCache(100)
    first = entry(5)
    cache.put("a", first)
    cache.put("a", entry(6))
    assert cache.get("a") is first and cache.num_bytes == 5


KEYS = st.sampled_from("abcdef")
VERBS = st.sampled_from(["put", "get", "hold", "release", "discard", "clear"])
ACTIONS = st.lists(
    st.tuples(VERBS, KEYS, st.integers(0, 40)),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(actions=ACTIONS, cap=st.integers(0, 60))
def test_books_balance_after_any_history(actions: list[tuple[str, str, int]], cap: int) -> None:
    cache = VisualCache(cap)
    held: dict[str, int] = {}
    arrived: set[str] = set()  # keys held without a break since they were seen in the cache
    for action, key, size in actions:
        if action == "put":
            cache.put(key, entry(size))
        elif action == "get":
            cache.get(key)
        elif action == "hold":
            cache.hold(key)
            held[key] = held.get(key, 0) + 1
        elif action == "release" and held.get(key):
            cache.release(key)
            held[key] -= 1
        elif action == "discard":
            cache.discard(key)
        elif action == "clear":
            cache.clear()
        cache.check_integrity()
        arrived = {name for name in arrived if held.get(name)}
        assert all(name in cache for name in arrived), "a held entry was lost"
        arrived |= {name for name, count in held.items() if count and name in cache}
    for key, count in held.items():
        for _ in range(count):
            cache.release(key)
    cache.clear()
    assert cache.num_bytes == len(cache) == cache.num_holds == 0
