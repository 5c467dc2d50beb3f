"""Steps for a GPU, right before one is there: each twin finds the faults of its kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_twins import CpuRecorder, HostSync, LateCopies
from decoders import execute, ids_of, random_decoder, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llm.backend.base import StepItem, StepPlan, greedy, largest
from llm.backend.cuda.device_logits import NUM_TOP, DeviceLogits, Outputs
from llm.backend.cuda.graphs import buckets_up_to
from llm.backend.cuda.paged_backend import PagedBackend
from llm.backend.cuda.step_batch import Staging, StepSizes, fill
from llm.backend.decoder import Decoder, DecoderWeights
from llm.backend.kv_pool import KvPool
from llm.backend.ragged import Limits, Ragged, flatten
from llm.backend.torch_backend import TorchBackend
from llm.decoder_config import DecoderConfig
from llm.request import SamplingParams
from llm.sampling.sampler import SamplerState
from vlm.loading import load_backend

BOUND = 1e-5
NUM_BLOCKS = 24


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[DecoderConfig, DecoderWeights]:
    path, _ = random_decoder(tmp_path_factory.mktemp("decoder"), "mistral_sliding")
    backend = load_backend(path, num_blocks=1, backend="torch")
    assert isinstance(backend, TorchBackend)
    return backend.config, backend.decoder.weights


def decodes(starts: list[int], seed: int) -> StepPlan:
    """One token of each of some sequences with tables of four blocks."""
    return StepPlan(
        tuple(
            StepItem((token,), start, tuple(range(4 * i, 4 * i + 4)), 1)
            for i, (token, start) in enumerate(zip(ids_of(seed, len(starts)), starts, strict=True))
        )
    )


def prompts(lengths: list[int]) -> StepPlan:
    return StepPlan(
        tuple(
            StepItem(tuple(ids_of(i, length)), 0, tuple(range(4 * i, 4 * i + 4)), 1)
            for i, length in enumerate(lengths)
        )
    )


def test_replayed_steps_equal_eager_ones_at_other_lengths_and_numbers_of_rows(
    decoder: tuple[DecoderConfig, DecoderWeights],
) -> None:
    captured = PagedBackend(*decoder, num_blocks=NUM_BLOCKS, recorder=CpuRecorder)
    eager = TorchBackend(*decoder, num_blocks=NUM_BLOCKS)
    lengths = [5, 30, 17, 44]
    for plan in (
        prompts(lengths),
        *(decodes([n + step for n in lengths[: 4 - step % 2]], step) for step in range(4)),
    ):
        assert relative_error(execute(captured, plan), execute(eager, plan)) <= BOUND


@pytest.mark.parametrize("fault", ["number", "made_outside"])
def test_a_stale_input_of_a_captured_step_is_found(
    decoder: tuple[DecoderConfig, DecoderWeights], fault: str
) -> None:
    captured = PagedBackend(*decoder, num_blocks=NUM_BLOCKS, recorder=CpuRecorder)
    eager = TorchBackend(*decoder, num_blocks=NUM_BLOCKS)
    right = captured._graphs
    assert right is not None
    step = captured._forward

    def stale(buffer: Tensor, sizes: StepSizes) -> Outputs:
        if fault == "number":
            return step(buffer + 0 * int(buffer[0]), sizes)
        return step(torch.from_numpy(buffer.numpy().copy()), sizes)

    right._step = stale
    plans = [prompts([5, 30]), decodes([5, 30], 0), decodes([6, 31], 1)]
    want = [execute(eager, plan) for plan in plans]
    try:
        got = [execute(captured, plan) for plan in plans]
    except HostSync:
        assert fault == "number"
    else:
        assert relative_error(got[-1], want[-1]) > 100 * BOUND


def test_padding_of_a_bucket_touches_no_block_of_anybodys(
    decoder: tuple[DecoderConfig, DecoderWeights],
) -> None:
    captured = PagedBackend(*decoder, num_blocks=NUM_BLOCKS, recorder=CpuRecorder)
    captured.execute(prompts([5, 30, 17]))
    before = captured.pool.data[:, :, :, :NUM_BLOCKS].clone()
    captured.execute(decodes([5, 30, 17], 3))
    changed = (captured.pool.data[:, :, :, :NUM_BLOCKS] != before).any(-1).sum((0, 1, 2))
    assert {tuple(place) for place in changed.nonzero().tolist()} == {(0, 5), (5, 14), (9, 1)}


@given(rows=st.integers(1, 300))
def test_a_bucket_holds_every_step_and_is_not_twice_as_large(rows: int) -> None:
    fitting = [bucket for bucket in buckets_up_to(max(rows, 9)) if bucket >= rows]
    assert fitting and fitting[0] < max(2 * rows, rows + 8)


def test_a_step_is_read_as_it_was_written_however_late_it_is_copied() -> None:
    limits = Limits(16, NUM_BLOCKS, 160, 384, 64)
    steps = [flatten(decodes([7 + step, 20], step), limits) for step in range(5)]
    copies = LateCopies()
    assert sent(Staging(torch.device("cpu"), copies), copies, steps) == [wanted(step) for step in steps]


def test_a_buffer_that_is_written_while_it_is_copied_is_found() -> None:
    limits = Limits(16, NUM_BLOCKS, 160, 384, 64)
    steps = [flatten(decodes([7 + step, 20], step), limits) for step in range(5)]
    copies = LateCopies()
    hasty = Staging(torch.device("cpu"), copies)
    start = copies.start

    def unwatched(host: np.ndarray, target: Tensor) -> Any:
        start(host, target)
        return None

    copies.start = unwatched  # type: ignore[method-assign]
    assert sent(hasty, copies, steps) != [wanted(step) for step in steps]


def sent(staging: Staging, copies: LateCopies, steps: list[Ragged]) -> list[list[int]]:
    targets = [torch.zeros(StepSizes.of(step).total, dtype=torch.int32) for step in steps]
    for step, target in zip(steps, targets, strict=True):
        staging.send(step, StepSizes.of(step), 0, target)
    copies.arrive()
    return [target.tolist() for target in targets]


def wanted(step: Ragged) -> list[int]:
    sizes = StepSizes.of(step)
    buffer = np.zeros(sizes.total, np.int32)
    fill(sizes.views(buffer), step, sizes, 0)
    return [int(number) for number in buffer]


def fake_weights(config: DecoderConfig, weights: DecoderWeights) -> DecoderWeights:
    """As many empty bfloat16 tensors on a GPU that isn't there."""

    def there(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty(value.shape, dtype=torch.bfloat16, device="cuda")
        return value

    layers = tuple(
        replace(layer, **{name: there(getattr(layer, name)) for name in type(layer).__dataclass_fields__})
        for layer in weights.layers
    )
    return DecoderWeights(there(weights.embedding), layers, there(weights.norm), there(weights.lm_head))


def whole_step(
    decoder: tuple[DecoderConfig, DecoderWeights], change: Callable[[dict[str, Tensor]], None] | None = None
) -> Outputs:
    """A step with a chunk, decodes and visual rows through `PagedBackend._forward` on fake tensors."""
    config, weights = decoder
    plan = StepPlan((*prompts([5, 30]).items, *decodes([9, 11, 13, 40], 1).items[2:]))
    with FakeTensorMode(), torch.inference_mode():
        backend = object.__new__(PagedBackend)
        backend.config = config
        backend.decoder = Decoder(config, fake_weights(config, weights), 256)
        backend.pool = KvPool(config, NUM_BLOCKS, 16, torch.device("cuda"), torch.bfloat16)
        sizes = StepSizes.of(flatten(plan, Limits(16, NUM_BLOCKS, 160, 256, config.row_width)))
        buffer = torch.empty(sizes.total, dtype=torch.int32, device="cuda")
        rows = torch.empty(4, config.row_width, dtype=torch.bfloat16, device="cuda")
        if change is not None:
            parts = sizes.views(buffer)
            change(parts)
        return backend._forward(buffer, sizes, ((6, rows),))


def test_the_whole_step_stays_on_the_device(decoder: tuple[DecoderConfig, DecoderWeights]) -> None:
    outputs = whole_step(decoder)
    assert {x.device.type for x in (outputs.logits, outputs.best, outputs.usable)} == {"cuda"}
    assert outputs.logits.dtype == torch.bfloat16 and outputs.logits.shape[0] == 4


def test_a_number_that_is_read_and_a_tensor_elsewhere_are_found(
    decoder: tuple[DecoderConfig, DecoderWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Exception, match="_local_scalar_dense"):
        whole_step(decoder, lambda parts: parts["lengths"].max().item())  # type: ignore[arg-type, return-value]
    forward = Decoder._norm

    def elsewhere(self: Decoder, x: Tensor, weight: Tensor) -> Tensor:
        return forward(self, x, weight) + torch.ones(x.shape[-1])

    monkeypatch.setattr(Decoder, "_norm", elsewhere)
    with pytest.raises(Exception, match="device"):
        whole_step(decoder)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    top_k=st.integers(1, 80),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    ties=st.booleans(),
)
def test_tokens_drawn_from_what_a_device_gives_are_those_of_the_whole_row(
    seed: int, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    logits = torch.randn(5, 300, generator=torch.manual_seed(seed)) * 4
    if ties:
        logits = logits.round()
    logits[3, 7] = torch.nan
    rows = DeviceLogits(Outputs.of(logits), 0, 5)[1:5]
    array = logits[1:5].numpy()
    best, usable = greedy(rows)
    for got, want in zip((best, usable), greedy(array), strict=True):
        np.testing.assert_array_equal(got, want)
    sampler = SamplerState(
        SamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p), (), 300, seed
    )
    assert largest(array, 0, top_k) is None
    for index in (0, 1, 3):
        np.testing.assert_array_equal(rows[index], array[index])
        top = largest(rows, index, sampler.num_candidates)
        if top_k < NUM_TOP and not ties:
            assert top is not None
        if top is not None:
            for position in range(8):
                assert sampler.sample_among(*top, position) == sampler.sample(array[index], position)
