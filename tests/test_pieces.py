"""What batch requests say comes in pieces and is the same: users.md S7."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llm.request import Delta, Event, Failed, Finished, Priority, TokenLogprob, Usage
from workers.local.delta_pieces import PIECE_TOKENS, Pieces


def deltas(name: str, choice: int, count: int) -> list[Event]:
    return [Delta(name, choice, (i,), f"{choice}.{i} ", (TokenLogprob(i, -float(i)),)) for i in range(count)]


def said(events: list[Event], name: str, choice: int) -> tuple[list[int], str, list[float]]:
    mine = [e for e in events if isinstance(e, Delta) and (e.request_id, e.choice) == (name, choice)]
    return (
        [token for delta in mine for token in delta.token_ids],
        "".join(delta.text for delta in mine),
        [logprob.logprob for delta in mine for logprob in delta.logprobs],
    )


@given(
    st.lists(st.tuples(st.sampled_from(["batch", "now"]), st.integers(0, 2), st.integers(1, 50)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_texts_tokens_and_order_stay_and_everything_is_told_before_its_end(rounds, random) -> None:  # type: ignore[no-untyped-def]
    priorities: dict[str, Priority] = {"batch": "batch", "now": "interactive"}
    pieces = Pieces(priorities.get)
    events = [event for name, choice, count in rounds for event in deltas(name, choice, count)]
    told: list[Event] = []
    while events:
        count = random.randint(1, len(events))
        told += pieces.join(events[:count])
        del events[:count]
    ends: list[Event] = [Finished("batch", 0, "stop", Usage(1, 0, 0, 1)), Failed("now", "code", "message")]
    told += pieces.join(ends)
    assert len(pieces) == 0
    assert [event for event in told if not isinstance(event, Delta)] == ends
    whole = [event for name, choice, count in rounds for event in deltas(name, choice, count)]
    for name in ("batch", "now"):
        for choice in range(3):
            assert said(told, name, choice) == said(whole, name, choice)


def test_the_first_token_is_told_at_once_and_the_rest_in_pieces() -> None:
    pieces = Pieces(lambda name: "batch")
    told = [pieces.join([event]) for event in deltas("a", 0, 1 + 2 * PIECE_TOKENS)]
    assert [len(events) for events in told] == [1] + ([0] * (PIECE_TOKENS - 1) + [1]) * 2


def test_what_a_request_that_left_did_not_hear_is_forgotten() -> None:
    pieces = Pieces(lambda name: "batch")
    pieces.join(deltas("a", 0, 5))
    pieces.forget("a")
    assert len(pieces) == 0 and pieces.join([Failed("a", "code", "message")]) == [
        Failed("a", "code", "message")
    ]
