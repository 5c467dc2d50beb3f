"""Rendezvous routing: who answers, who moves when replicas come and go, when a busy one is passed over."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm.request import ImageSpan, Prompt, VisualKey
from workers.cluster.node.replica_choice import choose, ranked, routing_key

NAMES = st.lists(st.text("abcdef-0123456789", min_size=1, max_size=12), min_size=1, max_size=8, unique=True)
KEYS = [f"image::{number:064x}" for number in range(400)]


def idle(names: list[str]) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


@settings(deadline=None, max_examples=50)
@given(NAMES, st.randoms(use_true_random=False))
def test_the_choice_depends_on_who_is_there_and_not_on_the_order(names: list[str], random: object) -> None:
    shuffled = list(names)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for key in KEYS[:20]:
        assert choose(key, idle(names)) == choose(key, idle(shuffled))


@settings(deadline=None, max_examples=50)
@given(NAMES.filter(lambda names: len(names) > 1))
def test_a_leaving_replica_moves_only_its_own_keys(names: list[str]) -> None:
    leaving, staying = names[0], names[1:]
    for key in KEYS[:100]:
        before, after = choose(key, idle(names)), choose(key, idle(staying))
        assert after == before or before == leaving
        assert before != leaving or after == ranked(key, names)[1]


@settings(deadline=None, max_examples=50)
@given(NAMES, st.text("xyz", min_size=1, max_size=5))
def test_a_joining_replica_takes_keys_and_moves_no_other(names: list[str], joining: str) -> None:
    for key in KEYS[:100]:
        before, after = choose(key, idle(names)), choose(key, idle([*names, joining]))
        assert after in (before, joining)


def test_shares_are_even() -> None:
    names = [f"replica-{number}" for number in range(4)]
    shares = [sum(choose(key, idle(names)) == name for key in KEYS) for name in names]
    assert min(shares) > 0.6 * len(KEYS) / 4 and max(shares) < 1.4 * len(KEYS) / 4


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(0, 30), min_size=1, max_size=6),
    st.integers(0, 10),
    st.sampled_from(KEYS),
)
def test_a_busy_favourite_is_passed_over_beyond_the_threshold_and_only_then(
    loads: dict[str, int], threshold: int, key: str
) -> None:
    favourite = ranked(key, list(loads))[0]
    chosen = choose(key, {name: float(load) for name, load in loads.items()}, threshold)
    if loads[favourite] - min(loads.values()) > threshold:
        assert loads[chosen] == min(loads.values())
    else:
        assert chosen == favourite


def test_spilled_requests_of_one_key_stay_together() -> None:
    for key in KEYS[:50]:
        first, second, *_ = order = ranked(key, ["a", "b", "c", "d"])
        assert choose(key, {name: 9.0 * (name == first) for name in order}, 4) == second


def test_without_replicas_it_says_so() -> None:
    with pytest.raises(ValueError, match="no replica"):
        choose("key", {})


def test_questions_about_one_image_share_a_key_whatever_the_text() -> None:
    def asked(image: str, question: tuple[int, ...]) -> Prompt:
        return Prompt((1, 0, 0, *question), (ImageSpan(1, 2, VisualKey(image), 0),))

    assert routing_key(asked("a" * 64, (5, 6))) == routing_key(asked("a" * 64, (7,)))
    assert routing_key(asked("a" * 64, (5, 6))) != routing_key(asked("b" * 64, (5, 6)))
    assert routing_key(asked("a" * 64, (5,))) != routing_key(asked("a" * 64, (5,)), "other tenant")


def test_text_prompts_that_begin_alike_share_a_key() -> None:
    head = tuple(range(64))
    assert routing_key(Prompt((*head, 1, 2))) == routing_key(Prompt((*head, 3)))
    assert routing_key(Prompt((1, 23))) != routing_key(Prompt((12, 3)))


def test_all_processes_choose_alike() -> None:
    """No `hash()`, which differs between processes."""
    names = ["a", "b", "c"]
    here = [choose(key, idle(names)) for key in KEYS[:50]]
    code = (
        "from workers.cluster.node.replica_choice import choose;"
        f"print([choose(key, dict.fromkeys({names!r}, 0.0)) for key in {KEYS[:50]!r}])"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == repr(here)
