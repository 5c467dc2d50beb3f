"""The processes of a service hold no more for having answered more: a short `vlm bench serve --part soak`."""

from __future__ import annotations

import pytest

from vlm.bench.serving.soak import ends, soak

SECONDS = 40.0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_engine_process_keeps_nothing_of_the_requests_that_it_answered() -> None:
    """A thousand requests of every kind in the second half; 45 kB of each were once kept."""
    figures = soak(SECONDS, {})
    assert figures["soak_undue_answers"]["value"] == 0
    assert len(figures["soak_answers"]["kinds"]) == 11
    assert figures["soak_memory_growth"]["value"] <= 0.02
    assert figures["soak_decoders_memory_growth"]["value"] <= 0.02


def test_growth_is_that_of_the_second_half() -> None:
    """Whatever was filled before, and whatever a single reading shows."""
    readings = [(float(at), 100 if at < 40 else 500) for at in range(101)]
    assert ends(readings) == (500, 500)
    rising = [(float(at), 1000 + at) for at in range(101)]
    assert ends(rising) == (1055, 1095)
    assert ends([*rising[:98], (98.0, 9999), *rising[99:]]) == (1055, 1095)
