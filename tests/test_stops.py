from __future__ import annotations

import itertools

from fake_backend import ByteTokens
from hypothesis import given
from hypothesis import strategies as st

from llm.request import SamplingParams
from llm.text.outputs import TextStream
from llm.text.stops import StopChecker

TEXT = st.text(alphabet="abcé", max_size=30)
STOPS = st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), max_size=4).map(tuple)


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop string begins that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(TEXT, STOPS, st.lists(st.integers(0, 30), max_size=10))
def test_text_is_cut_at_the_first_stop_wherever_pieces_end(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    checker, shown, stopped = StopChecker(stops), "", False
    for piece in pieces_of(text, cuts):
        part, stopped = checker.push(piece)
        shown += part
        if stopped:
            break
    if not stopped:
        shown += checker.flush()
    at = first_stop(text, stops)
    assert stopped == (at is not None)
    assert shown == (text if at is None else text[:at])


@given(TEXT, STOPS)
def test_only_what_could_start_a_stop_is_held_back(text: str, stops: tuple[str, ...]) -> None:
    checker, shown = StopChecker(stops), ""
    for length, character in enumerate(text, 1):
        part, stopped = checker.push(character)
        if stopped:
            return
        shown += part
        held = text[len(shown) : length]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_split_inside_a_utf8_character_is_found() -> None:
    """Tokens are single bytes here: both border kinds fall inside the stop string."""
    data = "price: 5€ and more".encode()
    tokens = ByteTokens(tuple(bytes([i]) for i in range(256)))
    stream, shown = TextStream(tokens, SamplingParams(stop=("€ a",))), ""
    for byte in data:
        part, stopped = stream.push(byte)
        shown += part
        assert "\ufffd" not in part
        if stopped:
            break
    assert stopped and shown == "price: 5"


def test_flush_shows_what_was_held_back() -> None:
    stream = TextStream(ByteTokens((b"x", b"stop"[:3])), SamplingParams(stop=("stop",)))
    assert stream.push(0) == ("x", False)
    assert stream.push(1) == ("", False)
    assert stream.flush() == ("sto", False)


def test_an_incomplete_character_at_the_end_is_flushed_as_a_replacement() -> None:
    stream = TextStream(ByteTokens((b"\xe2\x82",)), SamplingParams())
    assert stream.push(0) == ("", False)
    assert stream.flush() == ("\ufffd", False)
