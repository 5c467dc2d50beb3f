"""One loop gathers an answer from its events, for everything that waits for a whole one."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_architecture import ROOT, sources

from llm.request import Delta, Event, Failed, Finished, Timings, TokenLogprob, Usage, VisualKey, WantVisual
from workers.contract.engine_client import ENGINE_DIED
from workers.contract.streams import AnswerFailed, gather

USAGE, TIMINGS = Usage(5, 2, 1, 4), Timings(total_ms=7.0)


class Told:
    """A stream of events that knows whether it was closed."""

    def __init__(self, events: list[Event]) -> None:
        self.left = list(events)
        self.closed = False

    async def read(self) -> AsyncGenerator[Event, None]:
        try:
            while self.left:
                yield self.left.pop(0)
        finally:
            self.closed = True


@given(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3)), max_size=12), st.permutations([0, 1, 2]))
def test_each_choice_has_its_own_text_logprobs_and_end(said: list[tuple[int, str]], ends: list[int]) -> None:
    events: list[Event] = [WantVisual("r", VisualKey("k"))]
    events += [Delta("r", c, (i,), text, (TokenLogprob(i, -1.0),)) for i, (c, text) in enumerate(said)]
    events += [Finished("r", choice, "length" if choice == 1 else "stop") for choice in ends[:2]]
    events.append(Finished("r", ends[2], "length" if ends[2] == 1 else "stop", USAGE, TIMINGS))
    answer = asyncio.run(gather(Told(events).read()))
    assert (answer.usage, answer.timings, len(answer.choices)) == (USAGE, TIMINGS, 3)
    for index, choice in enumerate(answer.choices):
        mine = [(i, text) for i, (c, text) in enumerate(said) if c == index]
        assert choice.text == "".join(text for _, text in mine)
        assert [logprob.token_id for logprob in choice.logprobs] == [i for i, _ in mine]
        assert choice.finish_reason == ("length" if index == 1 else "stop")


def test_the_stream_is_closed_and_read_no_further_than_its_last_event() -> None:
    async def closed_on_return() -> bool:
        await gather(told.read())
        return told.closed

    told = Told([Finished("r", 0, "stop", USAGE, TIMINGS), Failed("other", "code", "message")])
    assert asyncio.run(closed_on_return()) and len(told.left) == 1


def test_a_failure_is_raised_as_it_was_told_and_a_stream_without_an_end_is_an_engine_that_died() -> None:
    failure = Failed("r", "code", "message", "param")
    for events, expected in (([failure], failure), ([], Failed("", *ENGINE_DIED))):
        told = Told([Delta("r", 0, (1,), "text"), *events])
        with pytest.raises(AnswerFailed, match=re.escape(expected.message)) as raised:
            asyncio.run(gather(told.read()))
        assert dataclasses.asdict(raised.value.failure) == dataclasses.asdict(expected) and told.closed


def test_only_streams_of_pieces_read_the_events_of_a_pipeline_themselves() -> None:
    loops = {
        str(path.relative_to(ROOT))
        for path in sources("vlm")
        if re.search(r"pipeline\.run\(|\.events\(\)", path.read_text())
    }
    # a request's events with its metrics, and the pieces of a stream, over HTTP and for Python
    assert loops == {"vlm/api/chat/generate.py", "vlm/api/chat/pieces.py", "vlm/library/model.py"}
