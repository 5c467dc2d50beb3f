"""Visual tokens against `transformers` on the same pixels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fidelity import DEFAULT_MODEL, SPECS, random_checkpoint, reference, top_two_gap
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionConfig, SmolVLMVisionEmbeddings

from encoder.encoder_weights import bucketed_positions
from vlm.loading import load_encoder


def random_tiles(count: int, size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


@torch.no_grad()
def relative_difference(directory: Path) -> float:
    """max|difference| / max|reference| over five tiles of two images."""
    encoder = load_encoder(directory)
    tiles = random_tiles(5, encoder.config.tower.image_size)
    features = reference(directory).model.get_image_features(encoder.normalise(tiles)[None])
    theirs = torch.cat(features.pooler_output)
    ours = torch.cat(encoder.encode([tiles[:2], tiles[2:]]))
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_default_checkpoint_gives_the_references_visual_tokens() -> None:
    assert relative_difference(DEFAULT_MODEL) <= 1e-4


@pytest.mark.parametrize("name", sorted(SPECS))
def test_random_checkpoint_gives_the_references_visual_tokens(name: str, tmp_path: Path) -> None:
    assert relative_difference(random_checkpoint(tmp_path, seed=7, spec=SPECS[name])) <= 1e-4


@pytest.mark.parametrize("name", sorted(SPECS))
def test_random_checkpoints_tell_their_likeliest_token_apart(name: str, tmp_path: Path) -> None:
    model = reference(random_checkpoint(tmp_path, seed=8, spec=SPECS[name]))
    assert top_two_gap(model, SPECS[name], torch.Generator().manual_seed(1)) > 0.1


@torch.no_grad()
def test_positions_are_the_references_for_every_grid() -> None:
    """The reference's embedding layer, made to show which position each patch of a full tile gets."""
    moved = []
    for side in range(1, 73):
        config = SmolVLMVisionConfig(hidden_size=1, image_size=side, patch_size=1)
        layer = SmolVLMVisionEmbeddings(config)
        layer.patch_embedding.weight.zero_()
        layer.patch_embedding.bias.zero_()
        layer.position_embedding.weight.copy_(torch.arange(side * side, dtype=torch.float32)[:, None])
        mask = torch.ones(1, side, side, dtype=torch.bool)
        positions = layer(torch.zeros(1, 3, side, side), mask).flatten().long()
        assert torch.equal(bucketed_positions(side), positions), side
        if not torch.equal(positions, torch.arange(side * side)):
            moved.append(side)
    assert {19, 25, 29, 31} <= set(moved) and not {14, 16, 24, 27, 32} & set(moved)


def test_uint8_tiles_become_the_processors_pixels() -> None:
    encoder = load_encoder(DEFAULT_MODEL)
    tiles = random_tiles(1, encoder.config.tower.image_size)
    expected = (tiles.transpose(0, 3, 1, 2) / 255 - 0.5) / 0.5
    assert np.abs(encoder.normalise(tiles).numpy() - expected).max() < 1e-6
