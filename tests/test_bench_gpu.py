"""The GPU benchmark runs to its end, on a device that Triton interprets."""

from __future__ import annotations

import pytest

from vlm.bench import gpu_bench
from vlm.plan.machine.synthetic import Sizes
from vlm.settings import SettingsError


@pytest.mark.slow
def test_every_figure_is_there_and_says_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BATCHES": (1, 3), "CONTEXT": 32, "PROMPT": 64, "PAGES": 2}.items():
        monkeypatch.setattr(gpu_bench, name, value)
    results = gpu_bench.run(quick=True, device="cpu", sizes=Sizes())["results"]
    assert set(results) == {
        "tower_images_per_s",
        "tower_share_of_gemm_peak",
        "prefill_tokens_per_s",
        "decode_tokens_per_s_b1",
        "decode_tokens_per_s_b3",
        "cold_ttft_ms",
        "warm_ttft_ms",
        "transformers_tower_images_per_s",
        "transformers_prefill_tokens_per_s",
    }
    for figure in results.values():
        assert figure["value"] > 0 and figure["device"] == "cpu" and figure["dtype"] == "bfloat16"


def test_without_the_device_it_says_so() -> None:
    with pytest.raises(SettingsError, match="device is cuda:63, and torch finds no such device"):
        gpu_bench.run(device="cuda:63")
