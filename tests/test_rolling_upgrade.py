"""Nodes and replicas of the first version and of this one serve each other: an upgrade needs no pause.

The first version's readers refuse every field that they do not know; these fields are written down here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import redis
from fake_backend import greedy, prompt_of, request_of
from fake_cluster import FakeNode, FakeReplica
from hypothesis import given
from test_messages import requests
from waiting import until

from llm.request import Delta, Event, Finished, Request
from workers.cluster.event_stream import stream_name
from workers.cluster.members import About
from workers.cluster.names import GenerateJob, InboxMessage
from workers.cluster.redis_client import connect
from workers.contract.messages import request_from_json, request_to_json
from workers.contract.versions import FIRST_VERSION

pytestmark = pytest.mark.redis

PROMPT = prompt_of([1, 2, 3])
JOB = {"call", "node", "request", "deadline_s", "sent_at"}
PARAMS = {
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "n", "beam_width", "stop", "ignore_eos", "logprobs",
    "prompt_logprobs", "constraint",
}  # fmt: skip
INBOX = {"op", "key", "blob", "code", "message"}
EVENTS = {
    "Started": {"request_id"},
    "Refused": {"request_id", "code", "message", "param"},
    "Delta": {"request_id", "choice", "token_ids", "text", "logprobs"},
    "Finished": {"request_id", "choice", "reason", "usage", "timings"},
    "Failed": {"request_id", "code", "message", "param"},
}


class FirstReplica(FakeReplica):
    """Knows the first version's fields, and says no version."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name, url)
        self.alter = self._check
        about = self.replica._about
        self.replica._heartbeat._about = lambda: self._unversioned(about())

    def _check(self, message: dict[str, Any]) -> None:
        assert message.keys() == JOB and message["request"]["params"].keys() <= PARAMS
        del message["request"]["version"]  # which it did not read

    def _unversioned(self, about: About | None) -> About | None:
        return None if about is None else {name: value for name, value in about.items() if name != "version"}


class FirstNode(FakeNode):
    """Says no version, and its times are those of a clock two hours ahead."""

    def _send_task(self, queue: str, job: GenerateJob) -> None:
        message = asdict(job)
        del message["request"]["version"]
        message["request"]["params"] = {
            name: value for name, value in message["request"]["params"].items() if name in PARAMS
        }
        message["sent_at"] = time.time() + 7200
        self._by_queue[queue].deliver(json.dumps(message))


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    client = connect(redis_url)
    yield client
    client.close()


async def answer(node: FakeNode, request: Request) -> list[int]:
    events: list[Event] = [event async for event in node.submit(request)]
    assert isinstance(events[-1], Finished)
    return [token for event in events if isinstance(event, Delta) for token in event.token_ids]


def test_a_replica_of_the_first_version_serves_this_ones_nodes(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats ask for what only this version can; the answer is the first version's then."""
    inbox: list[Mapping[str, Any]] = []
    read = InboxMessage.from_json
    monkeypatch.setattr(InboxMessage, "from_json", lambda value: read((inbox.append(value), value)[1]))

    async def main() -> None:
        replica = FirstReplica("a", redis_url)
        replica.replica._heartbeat.beat_now()
        node = FakeNode(redis_url, [replica], revision="revision")
        await node.start()
        try:
            await until(lambda: "version" not in node._replicas.alive.get("a", {"version": 1}))
            asked = request_of("r", PROMPT, drop_leading_space=True, fit_max_tokens=True)
            assert await answer(node, asked) == greedy(PROMPT, asked.params.max_tokens)
            replica.steps_at_once = 1
            leaver = node.submit(request_of("left", PROMPT, max_tokens=100))
            await anext(leaver)
            await leaver.aclose()
            await until(lambda: bool(inbox))
            assert inbox[0]["op"] == "cancel" and inbox[0].keys() == INBOX
        finally:
            await node.close()
            replica.replica.close()

    asyncio.run(main())


@given(requests)
def test_the_first_version_gets_of_a_request_what_it_reads(request: Request) -> None:
    value = request_to_json(request, FIRST_VERSION)
    assert value["params"].keys() == PARAMS and all(len(span) == 4 for span in value["spans"])
    again = request_from_json(json.loads(json.dumps(value)))
    assert again.prompt.token_ids == request.prompt.token_ids and again.params.stop == request.params.stop


def test_a_node_of_the_first_version_is_served_by_this_ones_replicas(
    redis_url: str, client: redis.Redis
) -> None:
    async def main() -> None:
        replica = FakeReplica("a", redis_url)
        node = FirstNode(redis_url, [replica], revision="revision")
        await node.start()
        try:
            await until(lambda: "a" in node.info["replicas"])
            assert await answer(node, request_of("r", PROMPT)) == greedy(PROMPT, 8)
            entries: Any = client.xrange(stream_name(node.node))
            for _, fields in entries:
                for _, number, events in json.loads(fields[b"b"]):
                    assert number >= 0
                    assert all(event.keys() - {"type"} <= EVENTS[event["type"]] for event in events)
        finally:
            await node.close()
            replica.replica.close()

    asyncio.run(main())
