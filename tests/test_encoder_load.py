"""Checkpoints are read strictly: every name accounted for, every shape checked, nothing else read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fidelity import DEFAULT_MODEL, SPECS, random_checkpoint
from safetensors.torch import load_file, save_file

from encoder.encoder_config import EncoderConfigError, TowerConfig
from encoder.encoder_weights import load_open_clip
from encoder.tensor_files import CheckpointError, read_index
from vlm.checkpoint import Checkpoint
from vlm.loading import load_encoder

State = dict[str, torch.Tensor]
NORM = "model.vision_model.post_layernorm.weight"
CONNECTOR = "model.connector.modality_projection.proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("load"), seed=3)


def edited(source: Path, target: Path, edit: Callable[[State], None]) -> Path:
    """A copy of a single-file checkpoint whose weights were changed."""
    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    edit(state)
    save_file(state, target / "model.safetensors")
    return target


def tokens(directory: Path) -> torch.Tensor:
    encoder = load_encoder(directory)
    size = encoder.config.tower.image_size
    tiles = np.random.default_rng(0).integers(0, 256, (2, size, size, 3), dtype=np.uint8)
    return encoder.encode([tiles])[0]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop(NORM), f"lacks {NORM}"),
        (lambda state: state.pop(CONNECTOR), f"lacks {CONNECTOR}"),
        (lambda state: state.update({"model.vision_model.head.probe": torch.ones(1)}), "unexpected weights"),
        (
            lambda state: state.update({"model.resampler.weight": torch.ones(1)}),
            r"unexpected weights: model\.res",
        ),
        (lambda state: state.update({NORM: torch.ones(49)}), r"shape \[49\], expected \[48\]"),
        (lambda state: state.update({NORM: torch.ones(48, dtype=torch.int8)}), "dtype I8"),
    ],
)
def test_names_shapes_and_dtypes_are_checked(
    checkpoint: Path, tmp_path: Path, edit: Callable[[State], None], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_encoder(edited(checkpoint, tmp_path / "edited", edit))


def test_one_file_and_several_give_the_same_encoder(tmp_path: Path) -> None:
    single = random_checkpoint(tmp_path / "one", seed=4)
    sharded = random_checkpoint(tmp_path / "several", seed=4, shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(tokens(single), tokens(sharded))
    assert Checkpoint.read(single).revision == Checkpoint.read(sharded).revision


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_stored_dtypes_are_read_as_what_they_hold(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = random_checkpoint(tmp_path / "stored", seed=5, dtype=dtype)
    raised = edited(
        stored, tmp_path / "raised", lambda state: state.update({k: v.float() for k, v in state.items()})
    )
    assert torch.equal(tokens(stored), tokens(raised))


def test_compute_dtype_is_the_callers(checkpoint: Path) -> None:
    encoder = load_encoder(checkpoint, dtype=torch.bfloat16)
    size = encoder.config.tower.image_size
    tiles = np.full((1, size, size, 3), 200, np.uint8)
    rows = encoder.encode([tiles])[0]
    exact = load_encoder(checkpoint).encode([tiles])[0]
    assert rows.dtype == torch.bfloat16
    assert (rows.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_files_that_are_cut_short_missing_or_elsewhere_are_errors(tmp_path: Path) -> None:
    sharded = random_checkpoint(tmp_path, seed=6, shard_size="40KB")
    index_file = sharded / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = sharded / index["weight_map"][NORM]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_encoder(sharded)
    shard.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_encoder(sharded)
    shard.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_encoder(sharded)
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    index_file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its directory"):
        load_encoder(sharded)
    index_file.unlink()
    (sharded / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        load_encoder(sharded)


def test_revision_follows_the_visual_weights_and_settings_and_nothing_else(
    checkpoint: Path, tmp_path: Path
) -> None:
    base = Checkpoint.read(checkpoint).revision
    assert len(base) == 64 and base == load_encoder(checkpoint).revision

    def nudged(name: str) -> str:
        def nudge(state: State) -> None:
            state[name].view(-1)[:1].add_(1)

        return Checkpoint.read(edited(checkpoint, tmp_path / name, nudge)).revision

    assert nudged("model.text_model.norm.weight") == base
    assert nudged(NORM) != base and nudged(CONNECTOR) != base
    settings = json.loads((checkpoint / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.4, 0.5, 0.5]
    changed = tmp_path / "settings"
    shutil.copytree(checkpoint, changed)
    (changed / "processor_config.json").write_text(json.dumps(settings))
    assert Checkpoint.read(changed).revision != base


def test_every_visual_tensor_of_a_checkpoint_is_used(checkpoint: Path) -> None:
    for name in read_index(checkpoint):
        assert name.startswith(("model.vision_model.", "model.connector.", "model.text_model.", "lm_head."))


def test_an_open_clip_tower_is_read_from_open_clips_file_or_drawn_from_a_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = TowerConfig(32, 2, 2, 40, image_size=45, patch_size=5, activation="gelu")
    monkeypatch.setattr("encoder.encoder_weights.open_clip_tower", lambda name: twin)
    tiles = np.random.default_rng(0).integers(0, 256, (2, 45, 45, 3), dtype=np.uint8)
    drawn = load_open_clip("twin", d_model=24, seed=1)
    rows = drawn.encode([tiles])[0]
    assert rows.shape == (2 * 25, 24)
    same, other = (load_open_clip("twin", d_model=24, seed=seed) for seed in (1, 2))
    assert torch.equal(rows, same.encode([tiles])[0]) and drawn.revision == same.revision
    assert other.revision != drawn.revision

    trunk, joiner, odd = (tmp_path / f"{name}.safetensors" for name in ("trunk", "joiner", "odd"))
    state = {f"visual.trunk.{key}": value for key, value in drawn.tower.state_dict().items()}
    beside = ("visual.trunk.attn_pool.q.bias", "text.anything", "logit_scale")
    save_file(state | {name: torch.ones(1) for name in beside}, trunk)
    save_file(drawn.connector.state_dict(), joiner)
    loaded = load_open_clip("twin", d_model=24, seed=9, pretrained=trunk, connector_weights=joiner)
    assert torch.equal(rows, loaded.encode([tiles])[0])

    save_file({"text.anything": torch.ones(1)}, odd)
    with pytest.raises(CheckpointError, match="lacks visual"):
        load_open_clip("twin", d_model=24, pretrained=odd)
    save_file(state | {"visual.head.proj.weight": torch.ones(1)}, odd)
    with pytest.raises(CheckpointError, match=r"unexpected weights: visual\.head"):
        load_open_clip("twin", d_model=24, pretrained=odd)


def test_unknown_open_clip_name_is_an_error() -> None:
    with pytest.raises(EncoderConfigError, match="open_clip tower must be one of"):
        load_open_clip("RN50", d_model=8)


def test_default_model_and_every_spec_have_the_tokens_their_processor_expects(tmp_path: Path) -> None:
    for directory in (DEFAULT_MODEL, random_checkpoint(tmp_path, seed=1, spec=SPECS["grid27_odd_pixels"])):
        expected = json.loads((directory / "processor_config.json").read_text())["image_seq_len"]
        assert load_encoder(directory).config.geometry.tokens_per_tile == expected
