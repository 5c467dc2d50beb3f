import itertools
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.batcher import TileBatcher
from encoder.cache import VisualCache
from encoder.connector import build_connector
from encoder.encoder_config import ConnectorConfig, EncoderConfig, TowerConfig
from encoder.encoder_model import Encoder, tiles_per_forward
from encoder.encoder_weights import load_open_clip
from encoder.openclip import open_clip_tower
from encoder.tower import Tower


def small_encoder(seed: int = 0) -> Encoder:
    """Two layers, an odd grid of 11x11 patches with a pixel left over, pooled 2x2: the articles' form."""
    torch.manual_seed(seed)
    config = EncoderConfig(
        TowerConfig(16, 2, 2, 24, image_size=56, patch_size=5, activation="gelu"),
        ConnectorConfig("average_pool", 2, d_model=12),
    )
    tower = Tower(config.tower)
    torch.nn.init.normal_(tower.pos_embed)
    return Encoder(config, tower, build_connector(config.connector, config.tower), "0" * 64)


def image(count: int, seed: int = 0, size: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


@settings(deadline=None, max_examples=10)
@given(counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), per_forward=st.integers(1, 6))
def test_ragged_batches_give_each_image_the_tokens_it_gets_alone(counts: list[int], per_forward: int) -> None:
    """Whatever shares a forward, tiles keep their order and only real tiles are computed."""
    encoder = small_encoder()
    images = [image(count, seed) for seed, count in enumerate(counts)]
    alone = [torch.cat([encoder.encode([tile[None]])[0] for tile in tiles]) for tiles in images]
    encoder.tiles_computed = 0
    encoder.tiles_per_forward = per_forward
    together = encoder.encode(images)
    assert encoder.tiles_computed == sum(counts)
    for ours, expected, count in zip(together, alone, counts, strict=True):
        assert ours.shape == (count * encoder.config.geometry.tokens_per_tile, encoder.d_model)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_an_encode_counts_its_progress_from_inside_forward_by_forward_and_layer_by_layer() -> None:
    encoder = small_encoder()
    encoder.tiles_per_forward = 1
    ticks = np.zeros(1, np.int64)
    encoder.count_progress(ticks)
    seen = [0]  # at the end of each layer
    for block in encoder.tower.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda *_: seen.append(int(ticks[0])))
    encoder.encode([image(2), image(1)])
    assert len(seen) == 1 + 3 * encoder.config.tower.num_layers
    assert all(after > before for before, after in itertools.pairwise(seen))


def test_each_result_owns_its_memory() -> None:
    """A cache counts `nbytes`; a view would keep the whole batch alive behind one small entry."""
    encoder = small_encoder()
    for rows in encoder.encode([image(3), image(1)]):
        assert rows.untyped_storage().nbytes() == rows.nbytes


def test_forwards_run_on_one_thread_of_their_own_whose_heap_holds_nothing_else() -> None:
    """Beside what outlives them, their temporaries would leave holes: gigabytes in an engine process."""
    encoder = small_encoder()
    threads: list[int] = []
    encoder.connector.register_forward_hook(lambda *_: threads.append(threading.get_ident()))
    for count in (1, 3):
        encoder.encode([image(count)])
    assert len(set(threads)) == 1 and threading.get_ident() not in threads


def test_visual_tokens_carry_no_graph() -> None:
    assert not small_encoder().encode([image(1)])[0].requires_grad


@pytest.mark.parametrize(
    "tiles",
    [
        image(1, size=55),
        image(1)[0],
        image(1).astype(np.float32),
        image(1)[:0],
        image(1)[..., :2],
    ],
)
def test_other_tiles_are_refused_before_anything_is_computed(tiles: np.ndarray) -> None:
    encoder = small_encoder()
    with pytest.raises(ValueError, match=r"tiles must be uint8 \[n, 56, 56, 3\]"):
        encoder.encode([image(1), tiles])
    assert encoder.tiles_computed == 0


def test_non_contiguous_tiles_are_what_they_look_like() -> None:
    encoder = small_encoder()
    wide = np.random.default_rng(1).integers(0, 256, (2, 56, 112, 3), dtype=np.uint8)
    view, copy = wide[:, :, ::2], wide[:, :, ::2].copy()
    assert torch.equal(encoder.encode([view])[0], encoder.encode([copy])[0])


def test_large_towers_take_one_tile_at_a_time_and_small_ones_many() -> None:
    small = small_encoder().config
    large = EncoderConfig(open_clip_tower("ViT-SO400M-14-SigLIP-384"), small.connector)
    assert tiles_per_forward(small, torch.device("cpu")) > 8
    assert tiles_per_forward(large, torch.device("cpu")) == 1
    assert tiles_per_forward(large, torch.device("cuda")) > 8


def test_batcher_and_encoder_fill_the_cache_with_what_the_encoder_gives() -> None:
    encoder = small_encoder()
    cache = VisualCache(1 << 20)
    batcher = TileBatcher(encoder.encode, cache, num_rows=encoder.num_rows, max_tiles=4)
    images = {"a": image(1, 1), "b": image(6, 2), "c": image(2, 3)}
    for key, tiles in images.items():
        cache.hold(key)
        batcher.put_tiles(key, tiles)
    while batcher.due_in() == 0.0:
        batcher.step()
    assert encoder.tiles_computed == 9
    for key, tiles in images.items():
        rows = cache.get(key)
        assert rows is not None
        torch.testing.assert_close(rows, encoder.encode([tiles])[0], rtol=1e-5, atol=1e-5)
    assert cache.num_bytes == sum(encoder.num_rows(t) for t in images.values()) * 12 * 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_articles_configuration_gives_196_tokens_a_tile() -> None:
    """The real SO400M trunk with drawn weights, 2 tiles, average pool 2x2."""
    encoder = load_open_clip("ViT-SO400M-14-SigLIP-384", d_model=64, seed=0)
    assert encoder.tiles_per_forward == 1
    rows = encoder.encode([image(1, size=384), image(1, seed=1, size=384)])
    assert [tuple(part.shape) for part in rows] == [(196, 64), (196, 64)]
    assert all(bool(part.isfinite().all()) for part in rows)
