"""Towers of images at their own size beside transformers' own on the same weights: a few of their layers."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from encoder.connector import build_connector
from encoder.encoder_model import Encoder
from encoder.encoder_weights import load_encoder
from encoder.tower import Tower
from preprocess.own_size import capped
from vlm.arithmetic import fast_arithmetic
from vlm.bench.harness.results import result, spread, timed
from vlm.config import CPU_PIXELS
from vlm.families.base import Family
from vlm.families.own_size.paddleocr_vl import FAMILY as PADDLEOCR_VL
from vlm.families.own_size.qwen_vl import QWEN2_5_VL

LAYERS = 4  # of 32 and 27: one of Qwen's four sees the whole image, as in the whole tower one of eight
PAGE = (4000, 3000)  # pixels
WIDTH, HEIGHT = 560, 420  # pixels; the last row of windows is a part of one


def qwen2_5_vl(rounds: int) -> dict[str, Any]:
    """Qwen2.5-VL's vision part, windows and merger included."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    vision = {"depth": LAYERS, "hidden_size": 1280, "out_hidden_size": 2048, "fullatt_block_indexes": [3]}
    model = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**vision)).eval()
    text = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2}
    ours = _ours(QWEN2_5_VL, {"vision_config": vision, "text_config": text}, {"visual.": model})

    def theirs(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        cells = pixels.view(3, HEIGHT // 28, 2, 14, WIDTH // 28, 2, 14).permute(1, 4, 2, 5, 0, 3, 6)
        patches = cells.unsqueeze(5).expand(*cells.shape[:5], 2, 14, 14).reshape(-1, 3 * 2 * 14 * 14)
        rows: torch.Tensor = model(patches, grid_thw=grid).pooler_output
        return rows

    return _compared(ours, {"visual": model}, theirs, "Qwen2.5-VL's vision part, drawn weights", rounds)


def paddleocr_vl(rounds: int) -> dict[str, Any]:
    """PaddleOCR-VL's: SigLIP turned by row and column."""
    from transformers.models.paddleocr_vl import modeling_paddleocr_vl as paddle
    from transformers.models.paddleocr_vl.configuration_paddleocr_vl import PaddleOCRVLConfig

    config = PaddleOCRVLConfig(text_config={}, vision_config={"num_hidden_layers": LAYERS})
    tower = paddle.PaddleOCRVisionModel(config.vision_config).eval()
    projector = paddle.PaddleOCRProjector(config).eval()
    told = {"vision_config": {"num_hidden_layers": LAYERS}}
    ours = _ours(PADDLEOCR_VL, told, {"visual.": tower, "mlp_AR.": projector})

    def theirs(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        patches = pixels.view(3, HEIGHT // 14, 14, WIDTH // 14, 14).permute(1, 3, 0, 2, 4)
        seen = tower(patches.reshape(1, -1, 3, 14, 14), grid_thw=grid).last_hidden_state
        rows: torch.Tensor = projector(seen, grid)
        return rows

    parts = {"tower": tower, "projector": projector}
    return _compared(ours, parts, theirs, "PaddleOCR-VL's vision part, drawn weights", rounds)


def longest_step() -> dict[str, Any]:
    """CPU seconds of the longest encode that a CPU's server makes: an image of PAGE through the whole of
    Qwen2.5-VL's vision part, shrunk to the cap. Drawn weights."""
    vision = {"depth": 32, "hidden_size": 1280, "out_hidden_size": 2048}
    text = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2}
    told = {"model_type": "qwen2_5_vl", "vision_config": vision, "text_config": text}
    config = QWEN2_5_VL.encoder(told, {})
    with torch.device("meta"):
        tower, connector = Tower(config.tower), build_connector(config.connector, config.tower)
    for network in (tower, connector):
        network.to_empty(device="cpu")
        for parameter in network.parameters():
            parameter.requires_grad_(False).normal_(0, 0.02)
    encoder = Encoder(config, tower, connector, "drawn")
    arithmetic = fast_arithmetic()
    encoder.multiply_in(arithmetic)
    grid = capped(QWEN2_5_VL.preprocess(told, {}, "fast").rule, CPU_PIXELS).grid(*PAGE)
    tiles = np.zeros((1, grid.tile_height, grid.tile_width, 3), np.uint8)
    seconds = timed(lambda: encoder.encode([tiles]))[2]
    return result(
        seconds,
        "CPU-s",
        model="Qwen2.5-VL's vision part, drawn weights",
        dtype=arithmetic,
        threads=torch.get_num_threads(),
        batch=1,
        context=(grid.tile_height // 14) * (grid.tile_width // 14),
        image=list(PAGE),
        tflop=round(encoder.flops(tiles) / 1e12, 2),
    )


def _ours(family: Family, config: dict[str, Any], parts: dict[str, nn.Module]) -> Encoder:
    """Our encoder with the weights of these parts, by their prefixes."""
    told = {"model_type": family.model_types[0], **config}
    with tempfile.TemporaryDirectory() as folder:
        tensors = {
            prefix + name: weight.contiguous()
            for prefix, part in parts.items()
            for name, weight in part.state_dict().items()
        }
        save_file(tensors, Path(folder) / "model.safetensors")
        seen = family.encoder(told, {})
        return load_encoder(Path(folder), seen, family.visual_names(seen)[0])


def _compared(
    encoder: Encoder,
    parts: dict[str, nn.Module],
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    name: str,
    rounds: int,
) -> dict[str, Any]:
    """CPU seconds of theirs over ours, normalisation on our side only; rows must be the same in float32.

    Where this CPU multiplies bfloat16 natively, ours does, and theirs is the faster one of both types.
    """
    tiles = np.random.default_rng(1).integers(0, 256, (1, HEIGHT, WIDTH, 3), np.uint8)
    pixels = encoder.normalise(tiles)[0].contiguous()
    grid = torch.tensor([[1, HEIGHT // 14, WIDTH // 14]])

    @torch.inference_mode()
    def theirs() -> torch.Tensor:
        return model(pixels, grid)

    rows, want = encoder.encode([tiles])[0], theirs()
    _check(rows, want, 1e-3, name)
    width, context = encoder.config.tower.width, HEIGHT // 14 * (WIDTH // 14)
    arithmetic = fast_arithmetic()
    dtype = torch.bfloat16 if arithmetic == "bfloat16" else torch.float32
    in_float32 = [timed(theirs)[2] for _ in range(rounds)]
    if dtype == torch.bfloat16:
        encoder.multiply_in(arithmetic)
        _check(encoder.encode([tiles])[0], want, 0.2, name)
        for part in parts.values():
            part.to(dtype)
        pixels = pixels.to(dtype)
        theirs()
    a, b = torch.randn(context, width).to(dtype), torch.randn(width, 4 * width).to(dtype)  # as an MLP's
    seconds = [
        [timed(one)[2] for one in (lambda: encoder.encode([tiles]), theirs, lambda: a @ b)]
        for _ in range(rounds)
    ]
    ours_s, theirs_s, product_s = (list(one) for one in zip(*seconds, strict=True))
    achieved = encoder.flops(tiles) / statistics.median(ours_s)
    peak = 2 * context * 4 * width**2 / min(product_s)
    return result(
        min(statistics.median(theirs_s), statistics.median(in_float32)) / statistics.median(ours_s),
        "times",
        model=f"{name}, {LAYERS} layers",
        dtype=arithmetic,
        threads=torch.get_num_threads(),
        batch=1,
        context=context,
        over_transformers_float32=round(statistics.median(in_float32) / statistics.median(ours_s), 2),
        fraction_of_gemm_peak=round(achieved / peak, 3),
        seconds=round(statistics.median(ours_s), 3),
        spread=spread(ours_s),
    )


def _check(rows: torch.Tensor, want: torch.Tensor, bound: float, name: str) -> None:
    difference = float((rows - want).abs().max() / want.std())
    if difference > bound:
        raise RuntimeError(f"{name}: rows differ by {difference:.1e} of their deviation")
