from __future__ import annotations

import numpy as np

from llm.sampling.beam import BeamSearch, Hypothesis

EOS = 0


def row(**probs: float) -> np.ndarray:
    """float64 [5] log-probabilities; token i is named t<i>."""
    values = np.full(5, 1e-9)
    for name, prob in probs.items():
        values[int(name[1:])] = prob
    return np.log(values)


def test_extensions_of_all_beams_are_ranked_together() -> None:
    ranked = BeamSearch(2, 9, frozenset({EOS})).rank([-1.0, -2.0], [row(t1=0.5, t2=0.1), row(t1=0.9, t3=0.3)])
    assert [(ext.parent, ext.token_id) for ext in ranked] == [(0, 1), (1, 1), (1, 3), (0, 2)]


def test_an_end_token_below_the_best_width_is_dropped() -> None:
    beam = BeamSearch(2, 9, frozenset({EOS}))
    ranked = beam.rank([0.0], [row(t1=0.4, t2=0.3, t0=0.2, t3=0.1)])
    assert [beam.is_end(ext, rank) for rank, ext in enumerate(ranked)] == [False] * 4
    assert [ext.token_id for ext in beam.live(ranked)] == [1, 2]
    ranked = beam.rank([0.0], [row(t1=0.4, t0=0.3, t2=0.2, t3=0.1)])
    assert [beam.is_end(ext, rank) for rank, ext in enumerate(ranked)] == [False, True, False, False]
    assert [ext.token_id for ext in beam.live(ranked)] == [1, 2]


def test_only_the_best_finished_ones_are_kept() -> None:
    beam = BeamSearch(2, 9, frozenset({EOS}))
    for score in (-3.0, -1.0, -2.0):
        beam.finish(Hypothesis((1, EOS), score, "stop"))
    assert [hypothesis.score for hypothesis in beam.finished] == [-1.0, -2.0]


def test_search_ends_when_no_live_beam_is_better_per_token() -> None:
    beam = BeamSearch(1, 9, frozenset({EOS}))
    beam.settle(-1.0, 2)
    assert not beam.is_done
    beam.finish(Hypothesis((1, EOS), -0.8, "stop"))
    beam.settle(-1.5, 2)
    assert not beam.is_done
    beam.settle(-1.7, 2)
    assert beam.is_done


def test_search_ends_at_its_last_token_or_without_live_beams() -> None:
    for best_live, num_tokens in ((-1.0, 9), (None, 3)):
        beam = BeamSearch(2, 9, frozenset({EOS}))
        beam.settle(best_live, num_tokens)
        assert beam.is_done
