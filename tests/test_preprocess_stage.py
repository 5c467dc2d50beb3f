"""The preprocess stage: pixels of the reference processor, and keys that say what the pixels are."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from preprocess.limits import ImageLimits
from preprocess.probe import probe
from preprocess.stage import PreprocessSpec, preprocess, tiles_key
from preprocess.tiling import AspectGridTiling, Idefics3Tiling
from preprocess.types import ImageError
from vlm.families.tiled import idefics3

SPEC = PreprocessSpec(Idefics3Tiling(tile_size=32, longest_edge=96))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shapes with hard edges, so that a resampling difference shows."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
    image = np.array(small.resize((width, height), Image.Resampling.BICUBIC))
    for _ in range(8):
        x, y = rng.integers(0, width), rng.integers(0, height)
        image[y : y + max(1, height // 5), x : x + max(1, width // 7)] = rng.integers(0, 256, 3)
    return Image.fromarray(image)


def encode(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


def reference_pixels(image: Image.Image, rule: Idefics3Tiling, resample: int) -> np.ndarray:
    """[num_tiles, H, W, 3] of transformers' processor that resizes with PIL, before normalisation."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    processor = SmolVLMImageProcessorPil(
        size={"longest_edge": rule.longest_edge},
        max_image_size={"longest_edge": rule.tile_size},
        do_image_splitting=rule.split,
        do_normalize=False,
        do_rescale=False,
        resample=resample,
    )
    return np.moveaxis(np.asarray(processor(image)["pixel_values"][0]), 1, -1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3_000), st.integers(1, 3_000), st.sampled_from(["auto", "low", "high"]))
def test_d10_rows_of_pixels_equal_the_count_from_the_header(width: int, height: int, detail: str) -> None:
    data = encode(Image.new("L", (width, height), 9), compress_level=1)
    limits = ImageLimits(max_aspect_ratio=3_000)
    info = probe(data, limits)
    spec = replace(SPEC, detail=detail)
    grid = spec.rule.grid(info.width, info.height, spec.detail)
    tiles = preprocess(data, spec, limits)
    assert tiles.grid == grid
    assert tiles.pixels.shape == (grid.num_tiles, 32, 32, 3) and tiles.pixels.dtype == np.uint8


@pytest.mark.parametrize(("width", "height"), [(1084, 820), (820, 1084)])
@pytest.mark.parametrize("orientation", [1, 6])
def test_d10_known_sizes_whichever_way_they_are_turned(width: int, height: int, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture(width, height), "JPEG", exif=exif.tobytes())
    info = probe(data)
    assert preprocess(data, SPEC).pixels.shape[0] == SPEC.rule.grid(info.width, info.height).num_tiles


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("resample", [1, 2, 3])
def test_exact_pixels_are_the_reference_processors(split: bool, resample: int) -> None:
    rng = np.random.default_rng(resample)
    for tile, edge in ((32, 128), (28, 100), (48, 48), (16, 120)):
        rule = Idefics3Tiling(tile, edge, split)
        for seed, (width, height) in enumerate(rng.integers(5, 400, (8, 2)).tolist()):
            image = picture(width, height, seed)
            spec = PreprocessSpec(rule, variant="exact", resample=resample)
            tiles = preprocess(encode(image), spec)
            expected = reference_pixels(image, rule, resample)
            assert tiles.pixels.shape == expected.shape
            assert np.abs(tiles.pixels.astype(int) - expected).max() <= 2


def test_exact_pixels_of_a_jpeg_are_the_reference_processors() -> None:
    data = encode(picture(700, 500), "JPEG", quality=90)
    rule = Idefics3Tiling(tile_size=64, longest_edge=256)
    expected = reference_pixels(Image.open(io.BytesIO(data)), rule, 1)
    tiles = preprocess(data, PreprocessSpec(rule, variant="exact"))
    assert np.abs(tiles.pixels.astype(int) - expected).max() <= 2


def test_detail_low_is_the_reference_without_splitting() -> None:
    image = picture(300, 200)
    spec = PreprocessSpec(Idefics3Tiling(32, 128), detail="low", variant="exact")
    expected = reference_pixels(image, Idefics3Tiling(32, 128, split=False), 1)
    assert np.abs(preprocess(encode(image), spec).pixels.astype(int) - expected).max() <= 2


@pytest.mark.parametrize("format_", ["JPEG", "PNG"])
@pytest.mark.parametrize(
    "rule", [Idefics3Tiling(64, 256), Idefics3Tiling(64, 256, False), AspectGridTiling(64)]
)
def test_fast_stays_near_exact(format_: str, rule: Idefics3Tiling | AspectGridTiling) -> None:
    data = encode(picture(1600, 1200), format_)
    exact, fast = (preprocess(data, PreprocessSpec(rule, variant=v)) for v in ("exact", "fast"))
    assert fast.grid == exact.grid
    assert np.abs(fast.pixels.astype(int) - exact.pixels).mean() < 3.0


def test_aspect_grid_tiles_are_cut_from_the_resized_image_in_reading_order() -> None:
    image = Image.new("RGB", (400, 300))
    for row in range(3):
        for col in range(4):
            image.paste((row * 80, col * 60, 7), (col * 100, row * 100, col * 100 + 100, row * 100 + 100))
    tiles = preprocess(encode(image), PreprocessSpec(AspectGridTiling(tile_size=20)))
    assert tiles.pixels.shape == (13, 20, 20, 3)
    for index in range(12):
        assert (tiles.pixels[index, 10, 10] == (index // 4 * 80, index % 4 * 60, 7)).all()
    assert (tiles.pixels[12, 3, 2] == (0, 0, 7)).all()


def test_uncut_image_of_the_aspect_grid_has_no_thumbnail() -> None:
    tiles = preprocess(encode(picture(16, 16)), PreprocessSpec(AspectGridTiling(tile_size=20)))
    assert tiles.pixels.shape == (1, 20, 20, 3)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "GIF"])
def test_d7_truncated_image_never_gives_tiles(format_: str) -> None:
    data = encode(picture(300, 300), format_)
    with pytest.raises(ImageError) as caught:
        preprocess(data[: len(data) // 2], SPEC)
    assert caught.value.code == "invalid_image"


def test_spec_round_trips_and_refuses_what_it_does_not_know() -> None:
    spec = PreprocessSpec(AspectGridTiling(), "low", "exact", (1, 2, 3), 3)
    raw = json.loads(json.dumps(spec.to_json()))
    assert PreprocessSpec.from_json(raw) == spec
    for key, value in (
        ("detail", "medium"),
        ("variant", "slow"),
        ("resample", 9),
        ("background", [0, 0, 300]),
    ):
        with pytest.raises(ValueError, match=key):
            PreprocessSpec.from_json({**raw, key: value})
    with pytest.raises(ValueError, match="keys"):
        PreprocessSpec.from_json({**raw, "other": 1})


def test_spec_from_config_takes_the_filter_of_the_processor() -> None:
    settings = {"resample": 3, "size": {"longest_edge": 10}, "max_image_size": {"longest_edge": 5}}
    spec = idefics3.preprocess({}, settings, "exact")
    assert spec == PreprocessSpec(Idefics3Tiling(5, 10), "auto", "exact", (255, 255, 255), 3)


def test_key_changes_with_all_that_changes_pixels() -> None:
    digest = "a" * 64
    others = [
        replace(SPEC, detail="low"),
        replace(SPEC, variant="exact"),
        replace(SPEC, background=(0, 0, 0)),
        replace(SPEC, resample=3),
        replace(SPEC, rule=Idefics3Tiling(32, 97)),
        replace(SPEC, rule=AspectGridTiling(32)),
    ]
    keys = [tiles_key(digest, spec) for spec in (SPEC, *others)] + [tiles_key("b" * 64, SPEC)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 and int(key, 16) >= 0 for key in keys)
    assert tiles_key(digest, SPEC) == tiles_key(digest, PreprocessSpec.from_json(SPEC.to_json()))


def test_p12_auto_and_high_share_a_key_because_they_share_pixels() -> None:
    assert tiles_key("a" * 64, SPEC) == tiles_key("a" * 64, replace(SPEC, detail="high"))
