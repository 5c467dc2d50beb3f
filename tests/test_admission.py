"""Who may start, after crowds that left and beside batch work by the hundreds."""

from __future__ import annotations

import pytest

from vlm.api.guard.admission import Admission
from vlm.config import MEBIBYTE, ServeConfig
from vlm.requests.errors import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("begun", [False, True])
def test_a_crowd_that_leaves_unanswered_costs_nobody_a_refusal_later(begun: bool) -> None:
    """Time in which a crowd was served or waited and then left is no sign of a slow service to come."""
    clock = Clock()
    admission = Admission(ServeConfig(), clock)

    def serve(count: int, duration_s: float, completed: bool) -> None:
        tickets = [admission.admit(0, "interactive", 300.0) for _ in range(count)]
        clock.now += duration_s
        for ticket in tickets:
            if completed or begun:
                ticket.begun()
            ticket.close(completed=completed)

    for _ in range(64):
        serve(1, 1.0, True)
    for _ in range(3):
        serve(200, 60.0, False)
    for _ in range(100):
        serve(3, 1.0, True)


def test_a_few_that_leave_do_not_make_a_loaded_service_look_idle() -> None:
    clock = Clock()
    admission = Admission(ServeConfig(), clock)
    tickets = [admission.admit(0, "interactive", 300.0) for _ in range(40)]
    for number in range(400):
        clock.now += 1.0
        leaver = tickets.pop(0)
        leaver.close(completed=number % 5 > 0)
        tickets.append(admission.admit(0, "interactive", 300.0))
    with pytest.raises(ApiError) as caught:
        admission.admit(0, "interactive", 20.0)
    assert caught.value.code == "deadline_unmeetable"


@pytest.mark.parametrize(
    ("size", "config"), [(0, ServeConfig(max_queued=8)), (MEBIBYTE, ServeConfig(max_decoded_mb=8))]
)
def test_batch_work_leaves_places_and_bytes_to_interactive_requests(size: int, config: ServeConfig) -> None:
    """S7 in front of the engine: no number of requests of tier flex refuses an interactive one."""
    admission = Admission(config)
    for _ in range(6):
        admission.admit(size, "batch", 300.0)
    with pytest.raises(ApiError):
        admission.admit(size, "batch", 300.0)
    for _ in range(2):
        admission.admit(size, "interactive", 300.0)
    with pytest.raises(ApiError):
        admission.admit(size, "interactive", 300.0)
