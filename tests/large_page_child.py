"""Prints what a page of 12 megapixels, capped as on a CPU, takes beyond the weights: MiB of pixels and tower.

Two layers of a tower as wide as Qwen2.5-VL's, one with windows and one without: layers take no more together
than one does.
"""

from __future__ import annotations

import io
import resource

import numpy as np
import torch
from PIL import Image

from encoder.connector import build_connector
from encoder.encoder_config import ConnectorConfig, EncoderConfig, TowerConfig
from encoder.encoder_model import Encoder
from encoder.tower import Tower
from preprocess.own_size import AreaResize, capped
from preprocess.stage import PreprocessSpec, preprocess
from vlm.config import CPU_PIXELS


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main() -> None:
    torch.set_num_threads(1)
    tower = TowerConfig(
        width=1280,
        num_layers=2,
        num_heads=16,
        intermediate=3420,
        image_size=0,
        patch_size=14,
        activation="silu",
        norm="rms",
        final_norm=None,
        patch_bias=False,
        gated=True,
        table="none",
        rope="axial",
        window=8,
        full_layers=(1,),
    )
    connector = ConnectorConfig("mlp", 2, 2048, intermediate=5120, norm="rms", norm_patches=True)
    config = EncoderConfig(tower, connector)
    encoder = Encoder(config, Tower(tower), build_connector(connector, tower), "")
    encoder.encode([np.zeros((1, 28, 28, 3), np.uint8)])
    buffer = io.BytesIO()
    Image.new("RGB", (4000, 3000), "white").save(buffer, "JPEG")
    rule = capped(AreaResize(28, 3136, 12_845_056), CPU_PIXELS)
    before = peak()
    pixels = preprocess(buffer.getvalue(), PreprocessSpec(rule)).pixels
    cut = peak()
    rows = encoder.encode([pixels])[0]
    print(cut - before, peak() - before, len(rows))


if __name__ == "__main__":
    main()
