"""The encoder beside its machine's limit, beside a padded batch, and beside transformers. One thread."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encoder.encoder_model import Encoder
from encoder.encoder_weights import load_open_clip
from vlm.bench import own_size_bench
from vlm.bench.harness.results import in_turn, report, result, spread, timed
from vlm.config import DEFAULT_MODEL
from vlm.loading import load_encoder

GEMM_SIDE = 1536  # large enough that a matrix product runs at the machine's best
TILE_COUNTS = (1, 13, 5, 2, 7, 1, 3, 10)  # tiles of the images that share a ragged batch


def run(quick: bool = False) -> dict[str, Any]:
    """Every figure is a ratio of CPU seconds taken in turn in this process, medians with spread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rounds = 3 if quick else 7
    try:
        small = load_encoder(Path(DEFAULT_MODEL))
        name = "ViT-B-16-SigLIP" if quick else "ViT-B-16-SigLIP-512"
        large = load_open_clip(name, d_model=576)
        drawn = f"open_clip:{name}, drawn weights"
        results = in_turn(
            "encoder",
            {
                name: lambda: {"fraction_of_gemm_peak": gemm_fraction(large, drawn, 1, rounds)},
                "the default model": lambda: {
                    "fraction_of_gemm_peak_default": gemm_fraction(small, "default", 16, rounds)
                },
                "products in bfloat16": lambda: in_bfloat16(name, drawn, rounds),
                "ragged batches": lambda: ragged(small, rounds),
                "beside transformers": lambda: {"over_transformers": over_transformers(small, rounds)},
                **({} if quick else own_sizes(rounds)),
            },
        )
    finally:
        torch.set_num_threads(threads)
    return report("encoder", results)


def own_sizes(rounds: int) -> dict[str, Callable[[], dict[str, dict[str, Any]]]]:
    """Towers of images at their own size, by what they are."""
    return {
        "Qwen2.5-VL's tower beside transformers": lambda: {
            "over_transformers_qwen2_5_vl": own_size_bench.qwen2_5_vl(rounds)
        },
        "PaddleOCR-VL's tower beside transformers": lambda: {
            "over_transformers_paddleocr_vl": own_size_bench.paddleocr_vl(rounds)
        },
        "the longest encode": lambda: {"longest_encode_cpu_s": own_size_bench.longest_step()},
    }


def gemm_fraction(encoder: Encoder, model: str, num_tiles: int, rounds: int) -> dict[str, Any]:
    """Achieved FLOP/s of whole encodes over the best matrix product's, alternating."""
    tiles = random_tiles(encoder, num_tiles)
    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE)
    encode_s, gemm_s = alternate(lambda: encoder.encode([tiles]), lambda: a @ b, rounds)
    achieved = encoder.flops(tiles) / statistics.median(encode_s)
    peak = 2 * GEMM_SIDE**3 / min(gemm_s)
    return result(
        achieved / peak,
        "of the best float32 matrix product",
        **circumstances(encoder, model, num_tiles),
        gflop_per_tile=round(encoder.flops(tiles[:1]) / 1e9, 3),
        encode_gflops=round(achieved / 1e9, 1),
        gemm_gflops=round(peak / 1e9, 1),
        seconds_per_tile=round(statistics.median(encode_s) / num_tiles, 5),
        spread=spread(encode_s),
    )


def in_bfloat16(name: str, model: str, rounds: int) -> dict[str, dict[str, Any]]:
    """The tower that multiplies in bfloat16 beside the float32 one, and how far its rows are off."""
    exact, half = (load_open_clip(name, d_model=576) for _ in range(2))
    half.multiply_in("bfloat16")
    tiles = random_tiles(exact, 1)
    want, got = exact.encode([tiles])[0], half.encode([tiles])[0]
    exact_s, half_s = alternate(lambda: exact.encode([tiles]), lambda: half.encode([tiles]), rounds)
    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE).bfloat16()
    product_s = min(timed(lambda: a @ b)[2] for _ in range(rounds))
    share = exact.flops(tiles) / statistics.median(half_s) / (2 * GEMM_SIDE**3 / product_s)
    return {
        "bf16_over_fp32": result(
            statistics.median(exact_s) / statistics.median(half_s),
            "times",
            **circumstances(half, model, 1),
            relative_error=round(float((got - want).norm() / want.norm()), 5),
            fraction_of_bf16_gemm_peak=round(share, 3),
            spread=spread(half_s),
        )
    }


def ragged(encoder: Encoder, rounds: int) -> dict[str, dict[str, Any]]:
    """Images of 1 to 13 tiles in one batch: tiles computed, padding, and the padded batch's price."""
    images = [random_tiles(encoder, count) for count in TILE_COUNTS]
    padded = [np.pad(tiles, ((0, max(TILE_COUNTS) - len(tiles)), (0, 0), (0, 0), (0, 0))) for tiles in images]
    before = encoder.tiles_computed
    encoder.encode(images)
    computed, real = encoder.tiles_computed - before, sum(TILE_COUNTS)
    num_padded = len(padded) * max(TILE_COUNTS)
    ragged_s, padded_s = alternate(lambda: encoder.encode(images), lambda: encoder.encode(padded), rounds)
    common = circumstances(encoder, "default", len(images)) | {"real_tiles": real, "padded_tiles": num_padded}
    return {
        "ragged_tiles_computed": result(computed, "tiles", **common),
        "ragged_overhead": result(
            computed / real - 1,
            "of the real tiles, padding",
            **common,
            padded_overhead=round(num_padded / real - 1, 3),
        ),
        "padded_over_ragged_time": result(
            statistics.median(padded_s) / statistics.median(ragged_s),
            "times",
            **common,
            spread=spread(ragged_s),
        ),
    }


def over_transformers(encoder: Encoder, rounds: int) -> dict[str, Any]:
    """`get_image_features` on the same tiles over ours, normalisation included on our side only."""
    from transformers import SmolVLMForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = SmolVLMForConditionalGeneration.from_pretrained(DEFAULT_MODEL, dtype=torch.float32)
    model.eval()
    tiles = random_tiles(encoder, 16)
    pixels = encoder.normalise(tiles)[None].contiguous()

    @torch.inference_mode()
    def theirs() -> None:
        model.model.get_image_features(pixels)

    ours_s, theirs_s = alternate(lambda: encoder.encode([tiles]), theirs, rounds)
    return result(
        statistics.median(theirs_s) / statistics.median(ours_s),
        "times",
        **circumstances(encoder, "default", 16),
        spread=spread(ours_s),
    )


def alternate(
    ours: Callable[[], object], other: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """CPU seconds of each, taken in turn after one warm-up of both."""
    ours()
    other()
    pairs = [(timed(ours)[2], timed(other)[2]) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def random_tiles(encoder: Encoder, count: int) -> np.ndarray:
    size = encoder.config.tower.image_size
    return np.random.default_rng(count).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def circumstances(encoder: Encoder, model: str, batch: int) -> dict[str, Any]:
    return {
        "model": model,
        "dtype": str(encoder.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "batch": batch,
        "context": encoder.config.tower.num_patches,
    }
