"""Waiting for a condition that another task or process brings about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """As `until`, where no event loop runs."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Raises AssertionError if it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)
