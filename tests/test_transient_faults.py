"""Faults of the service's own are nobody else's: clients may try again, and so does a later caption run."""

from __future__ import annotations

import pytest

from vlm.caption.rows import RETRIED_CODES
from vlm.requests.errors import from_code
from workers.cluster.node.remote_visuals import encode_timed_out
from workers.contract.engine_client import ENGINE_DIED, SHUTTING_DOWN
from workers.contract.faults import OURS, TIMED_OUT, TRANSIENT
from workers.contract.stages import StageUnavailable, deadline_passed, overloaded, unreachable


@pytest.mark.parametrize("fault", [deadline_passed(), overloaded(), unreachable(), encode_timed_out()])
def test_a_stage_without_time_is_no_fault_of_the_request(fault: StageUnavailable) -> None:
    assert from_code(fault.code, fault.message).status_code == 503


@pytest.mark.parametrize("fault", [ENGINE_DIED, SHUTTING_DOWN, TIMED_OUT])
def test_an_engine_without_time_is_no_fault_of_the_request(fault: tuple[str, str]) -> None:
    assert from_code(*fault).status_code == 503


@pytest.mark.parametrize("code", sorted(OURS))
def test_a_fault_of_ours_that_stays_is_a_500_that_nobody_tries_again(code: str) -> None:
    assert from_code(code, "").status_code == 500 and code not in TRANSIENT


@pytest.mark.parametrize("code", [f.code for f in (deadline_passed(), overloaded(), unreachable())])
def test_a_page_that_a_stage_had_no_time_for_is_tried_again(code: str) -> None:
    assert code in RETRIED_CODES
