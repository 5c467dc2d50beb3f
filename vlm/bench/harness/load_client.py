"""A load generator's client: one connection, server-sent events, a time stamp for every token.

Plain asyncio streams: on a small machine the generator must not take the server's processor.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """One request as its client saw it. Times on time.perf_counter()."""

    key: int  # which of the workload's bodies
    sent: float
    status: int = 0
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    error: str = ""  # code of the error object, if one came
    retry_after_s: float = 0.0

    @property
    def completed(self) -> bool:
        return self.status == 200 and not self.error and bool(self.usage)

    @property
    def warm(self) -> bool:
        """Nothing of its images was computed for it."""
        return self.timings.get("encode_ms", 1.0) == 0.0

    @property
    def ttft_ms(self) -> float:
        return (self.token_times[0] - self.sent) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot_ms(self) -> float:
        gaps = self.gaps_ms
        return sum(gaps) / len(gaps) if gaps else 0.0


class LoadClient:
    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def close(self) -> None:
        if self._streams:
            self._streams[1].close()
            self._streams = None

    async def _send(self, body: bytes) -> tuple[asyncio.StreamReader, int, dict[str, str]]:
        """(what follows the headers, status, headers)"""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=1 << 22)
        reader, writer = self._streams
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if ": " in line)
        return reader, int(head[0].split()[1]), headers

    async def plain(self, body: bytes) -> dict[str, Any]:
        """The answer to a body that asks for no stream."""
        reader, _, headers = await self._send(body)
        data: dict[str, Any] = json.loads(await reader.readexactly(int(headers["content-length"])))
        return data

    async def ask(self, body: bytes, key: int = 0) -> Sample:
        """`body` asks for a stream with usage. Raises OSError and asyncio.IncompleteReadError."""
        sample = Sample(key, time.perf_counter())
        reader, sample.status, headers = await self._send(body)
        if headers.get("transfer-encoding") == "chunked":
            await self._read_stream(reader, sample)
        else:
            data = json.loads(await reader.readexactly(int(headers["content-length"])))
            sample.error = data["error"]["code"]
            sample.retry_after_s = float(headers.get("retry-after", 0))
        sample.ended = time.perf_counter()
        if headers.get("connection") == "close":
            await self.close()
        return sample

    async def _read_stream(self, reader: asyncio.StreamReader, sample: Sample) -> None:
        rest = b""
        while size := int(await reader.readline(), 16):
            rest += await reader.readexactly(size)
            await reader.readexactly(2)
            now = time.perf_counter()
            *events, rest = rest.split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    _take(sample, json.loads(event[6:]), now)
        await reader.readexactly(2)


def _take(sample: Sample, event: dict[str, Any], now: float) -> None:
    if "error" in event:
        sample.error = event["error"]["code"]
        return
    sample.timings = event.get("timings") or sample.timings
    sample.usage = event.get("usage") or sample.usage
    for choice in event["choices"]:
        text = choice["delta"].get("content")
        if text:
            sample.token_times.append(now)
            sample.text += text


async def closed_loop(
    address: tuple[str, int], bodies: Sequence[bytes], pick: Callable[[], int], clients: int, seconds: float
) -> list[Sample]:
    """Each client asks again as soon as it has its answer; one that is refused waits for Retry-After."""
    samples: list[Sample] = []
    end = time.perf_counter() + seconds

    async def run() -> None:
        client = LoadClient(*address)
        try:
            while time.perf_counter() < end:
                key = pick()
                sample = await client.ask(bodies[key], key)
                samples.append(sample)
                if not sample.completed:
                    await asyncio.sleep(min(sample.retry_after_s or 0.1, max(0.0, end - time.perf_counter())))
        finally:
            await client.close()

    await asyncio.gather(*(run() for _ in range(clients)))
    return samples


async def open_loop(
    address: tuple[str, int], bodies: Sequence[bytes], arrivals: Sequence[tuple[float, int]]
) -> list[Sample]:
    """`arrivals`: (seconds from the start, which body). Late answers delay no arrival."""
    start = time.perf_counter()
    idle: list[LoadClient] = []

    async def run(at: float, key: int) -> Sample:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        client = idle.pop() if idle else LoadClient(*address)
        sample = await client.ask(bodies[key], key)
        idle.append(client)
        return sample

    samples = list(await asyncio.gather(*(run(at, key) for at, key in arrivals)))
    for client in idle:
        await client.close()
    return samples
