"""Rope by rows and columns, and windows of patches, against transformers' own functions."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.vision_utils import get_vision_window_index

from encoder.geometry import TileShape, TowerShape, VisionGeometry
from encoder.positions import windows_of
from llm.backend.base import StepItem, StepPlan
from llm.backend.ragged import Limits, PlanError, flatten
from llm.engine import _check_prompt
from llm.request import ImageSpan, Prompt, RequestError, VisualKey
from llm.rope_positions import chunked_axes, interleaved_axes, rope_positions

DECODED = 20


class Reference:
    """What `get_rope_index` asks of its model."""

    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    get_vision_position_ids = qwen2.Qwen2VLModel.get_vision_position_ids
    get_rope_index = qwen2.Qwen2VLModel.get_rope_index


def random_prompt(draw: random.Random) -> tuple[int, tuple[ImageSpan, ...]]:
    """(tokens, spans): 0 to 4 images, some text around each."""
    length, spans = draw.randint(1, 9), []
    for number in range(draw.randint(0, 4)):
        rows, cols = draw.randint(1, 12), draw.randint(1, 12)
        spans.append(ImageSpan(length, rows * cols, VisualKey(str(number)), 0, (rows, cols)))
        length += rows * cols + draw.randint(1, 9)
    return length, tuple(spans)


def reference_positions(length: int, spans: tuple[ImageSpan, ...]) -> tuple[np.ndarray, int]:
    """(int [3, length], what is added to a later token's index)."""
    types = torch.zeros(1, length, dtype=torch.long)
    for span in spans:
        types[0, span.start : span.start + span.length] = 1
    shapes = [span.shape for span in spans if span.shape]
    grids = torch.tensor([[1, 2 * rows, 2 * cols] for rows, cols in shapes]) if shapes else None
    found, delta = Reference().get_rope_index(torch.zeros_like(types), types, image_grid_thw=grids)
    return found[:, 0].numpy(), int(delta)


def test_positions_equal_the_references_whole_in_chunks_and_while_decoding() -> None:
    draw = random.Random(11)
    for _ in range(500):
        length, spans = random_prompt(draw)
        want, delta = reference_positions(length, spans)
        later = np.arange(length, length + DECODED) + delta
        want = np.concatenate([want, np.repeat(later[None], 3, 0)], 1)
        cuts = sorted({0, length + DECODED, *(draw.randrange(1, length + DECODED) for _ in range(4))})
        for start, end in itertools.pairwise(cuts):
            found = rope_positions(spans, start, end)
            if found is None:
                assert not spans
                found = np.repeat(np.arange(start, end)[None], 3, 0)
            assert np.array_equal(found, want[:, start:end]), (spans, start, end)
            assert (found <= np.arange(start, end)).all() and found.min() >= 0


@given(st.lists(st.integers(1, 9), min_size=3, max_size=3))
def test_axes_of_frequencies_are_the_references(sections: list[int]) -> None:
    by_axis = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, sum(sections)).clone()
    for module, ours in (
        (qwen2.Qwen2VLRotaryEmbedding, chunked_axes(sections)),
        (qwen3.Qwen3VLTextRotaryEmbedding, interleaved_axes(sections)),
    ):
        if module is qwen3.Qwen3VLTextRotaryEmbedding and 3 * max(sections[1:]) > sum(sections):
            continue  # those beyond the last frequency
        rope = SimpleNamespace(mrope_section=sections)
        found = module.recomposition_frequencies(rope, by_axis.clone())[0, 0].tolist()
        assert found == [float(axis) for axis in ours * 2]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))
def test_windows_are_the_references(rows: int, cols: int, cells: int) -> None:
    """Cells of 2 x 2 patches; the order of windows and of patches inside one is our own."""
    index, ends = get_vision_window_index(torch.tensor([[1, 2 * rows, 2 * cols]]), 2, cells * 28, 14)
    cuts = [end // 4 for end in ends.tolist()]
    want = {frozenset(index[a:b].tolist()) for a, b in itertools.pairwise(cuts)}
    windows = windows_of(2 * rows, 2 * cols, 2 * cells, torch.device("cpu"))
    assert torch.equal(windows.order[windows.places], torch.arange(4 * rows * cols))
    found, start = set(), 0
    for count, size in windows.groups:
        for _ in range(count):
            patches = windows.order[start : start + size]
            found.add(frozenset((patches // (2 * cols) // 2 * cols + patches % (2 * cols) // 2).tolist()))
            start += size
    assert found == want and start == 4 * rows * cols

    shape = TowerShape(VisionGeometry(0, 14, 2), 5, 8, 8, 8, window=2 * cells, full_layers=2)
    full = TowerShape(VisionGeometry(0, 14, 2), 5, 8, 8, 8)
    grid = TileShape(1, cols * 28, rows * 28)
    saved = 4 * 3 * 8 * ((4 * rows * cols) ** 2 - sum(count * size**2 for count, size in windows.groups))
    assert full.flops(grid) - shape.flops(grid) == saved


def test_a_span_whose_shape_is_not_its_length_is_refused() -> None:
    for shape in ((2, 4), (0, 6), (-2, -3)):
        span = ImageSpan(1, 6, VisualKey("a"), 0, shape)
        with pytest.raises(RequestError, match="shape"):
            _check_prompt(Prompt((1,) * 9, (span,)), 5)
    _check_prompt(Prompt((1,) * 9, (ImageSpan(1, 6, VisualKey("a"), 0, (2, 3)),)), 5)


@pytest.mark.parametrize(
    "rope", [np.full((3, 2), 4), np.full((3, 2), -1), np.zeros((3, 1)), np.zeros((2, 2))]
)
def test_rope_positions_outside_their_sequence_are_refused(rope: np.ndarray) -> None:
    item = StepItem((1, 1), 2, (0,), 1, rope=rope)
    with pytest.raises(PlanError):
        flatten(StepPlan((item,)), Limits(16, 1, 5, 16, 8))
