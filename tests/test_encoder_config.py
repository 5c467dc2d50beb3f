import json
import subprocess
import sys
from pathlib import Path

import pytest
from fidelity import DEFAULT_MODEL

from encoder.encoder_config import EncoderConfigError, TowerConfig
from llm.decoder_config import ConfigError
from vlm.checkpoint import Checkpoint
from vlm.families.registry import family_of

HF = {
    "model_type": "smolvlm",
    "scale_factor": 2,
    "text_config": {"hidden_size": 64},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    },
}


def changed(**vision: object) -> dict:
    return HF | {"vision_config": HF["vision_config"] | vision}  # type: ignore[operator]


def test_default_checkpoints_geometry() -> None:
    config = Checkpoint.read(DEFAULT_MODEL).encoder
    assert config.geometry.tokens_per_tile == 16
    assert config.connector.d_model == 128
    assert config.normalisation.mean == (0.5, 0.5, 0.5)


def test_what_a_config_leaves_out_has_the_familys_default() -> None:
    """SmolVLM-256M's published config.json names only these vision settings."""
    published = {
        "model_type": "idefics3",
        "scale_factor": 4,
        "text_config": {"hidden_size": 576},
        "vision_config": {
            "hidden_size": 768,
            "image_size": 512,
            "num_attention_heads": 12,
            "patch_size": 16,
            "max_image_size": {"longest_edge": 512},
            "size": {"longest_edge": 2048},
        },
    }
    config = family_of(published).encoder(published, {})
    assert config.tower == TowerConfig(768, 12, 12, 3072, 512, 16, "gelu_tanh", 1e-6)
    assert config.geometry.tokens_per_tile == 64


def test_both_layouts_of_processor_settings_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF))
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": 0.25, "rescale_factor": 0.5}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_seq_len": 4}))
    old = Checkpoint.read(tmp_path).encoder
    assert (old.normalisation.mean, old.normalisation.std) == ((0.1, 0.2, 0.3), (0.25, 0.25, 0.25))
    assert old.normalisation.scale == 0.5
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": {"do_normalize": False}}))
    assert Checkpoint.read(tmp_path).encoder.normalisation.mean == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(num_channels=1), "num_channels must be 3"),
        (changed(hidden_act="relu"), "hidden_act must be one of"),
        (changed(image_size=[64, 32]), "image_size must be square"),
        (changed(num_attention_heads=5), "width must be a multiple of num_heads"),
        (changed(image_size=80), "doesn't fit the tower's 5x5 patches"),
        (changed(patch_size=65), "patch_size must not exceed image_size"),
    ],
)
def test_what_this_encoder_cannot_do_is_an_error_that_names_it(config: dict, message: str) -> None:
    with pytest.raises(EncoderConfigError, match=message):
        family_of(config).encoder(config, {})


def test_missing_and_broken_files_are_errors_without_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        Checkpoint.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not readable JSON") as caught:
        Checkpoint.read(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_geometry_config_revision_cache_and_batcher_load_no_torch() -> None:
    modules = (
        "geometry",
        "encoder_config",
        "tensor_names",
        "tensor_files",
        "revision",
        "openclip",
        "cache",
        "batcher",
    )
    code = f"import sys, {', '.join(f'encoder.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
