from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llm.scheduling.budget import StepBudget


def test_without_decodes_a_step_takes_the_whole_budget() -> None:
    assert StepBudget(512, 16, 2.0, 1.0).chunk_tokens(0) == 512


def test_a_fixed_budget_counts_decodes_in() -> None:
    budget = StepBudget(100, 4, None, 1.0)
    assert [budget.chunk_tokens(n) for n in (0, 30, 99)] == [100, 70, 4]


def test_decodes_run_alone_once_so_that_their_time_is_known() -> None:
    budget = StepBudget(512, 16, 2.0, 1.0)
    assert budget.chunk_tokens(8) == 0
    budget.observe(8, 0, 0.010)
    assert budget.chunk_tokens(8) == 16


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 1e-2), st.floats(1.2, 10.0))
def test_mixed_steps_settle_within_the_stretch(decode_s: float, token_s: float, stretch: float) -> None:
    """A machine whose steps take decode_s + token_s per chunk token: the bound holds after calibration,
    wherever the smallest chunk allows it, and most of the allowance is used."""
    budget = StepBudget(2048, 16, stretch, 10.0)
    budget.observe(8, 0, decode_s)
    chunk = 0
    for _ in range(40):
        chunk = budget.chunk_tokens(8)
        budget.observe(8, chunk, decode_s + chunk * token_s)
    allowed = (stretch - 1) * decode_s / token_s
    assert 16 <= chunk <= max(16.0, allowed * 1.01 + 1)
    assert chunk >= min(allowed * 0.5, 2040)


@given(st.floats(1e-6, 0.1), st.floats(0.05, 5.0))
def test_a_prompt_that_nothing_decodes_beside_is_computed_in_pieces_of_a_stated_time(
    token_s: float, max_step_s: float
) -> None:
    """Whoever comes meanwhile waits for one of them: also of the first, whose rate is not known yet."""
    budget = StepBudget(2048, 4, 2.0, max_step_s, min_alone=64)
    for _ in range(5):
        chunk = budget.chunk_tokens(0)
        assert 64 <= chunk <= max(64.0, max_step_s / token_s + 1)
        budget.observe(0, chunk, chunk * token_s)
    assert chunk >= min(0.99 * max_step_s / token_s - 1, 2048)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 600), st.floats(0.0, 1.0)), max_size=30))
def test_whatever_was_measured_the_budget_stays_in_its_limits(history: list[tuple[int, int, float]]) -> None:
    budget = StepBudget(512, 16, 2.0, 1.0)
    for decodes, chunk, seconds in history:
        budget.observe(decodes, chunk, seconds)
        assert budget.chunk_tokens(8) in {0, *range(16, 505)}
        assert budget.chunk_tokens(0) == 512
