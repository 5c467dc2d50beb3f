import json

import open_clip
import pytest
import torch
from scripts_of import load_script

from encoder.connector import build_connector
from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError
from encoder.openclip import INDEX, open_clip_tower
from encoder.tower import Tower, activate, attend

script = load_script("docs/openclip_index.py")


def trunk_of(name: str, **sizes: int) -> torch.nn.Module:
    """The timm model that open_clip's config names, built as open_clip's TimmModel does."""
    vision = open_clip.get_model_config(name)["vision_cfg"]
    return script.build_trunk(vision["timm_model_name"], vision["timm_pool"], **sizes)


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Weights that no part of the network can hide behind: biases and norms away from their defaults."""
    generator = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        spread = weight[0].numel() ** -0.5 if weight.dim() > 1 else 0.2
        weight.data.copy_(
            torch.randn(weight.shape, generator=generator) * spread + (weight.data == 1).float()
        )


def tower_like(trunk: torch.nn.Module) -> Tower:
    """Our tower with the trunk's weights by timm's own names: none missing, only the pooling left over."""
    tower = Tower(script.config_of(trunk))
    state = {key: value for key, value in trunk.state_dict().items() if not key.startswith("attn_pool.")}
    tower.load_state_dict(state, strict=True)
    return tower.eval()


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ViT-SO400M-14-SigLIP-384", {"embed_dim": 96, "depth": 3, "num_heads": 4}),  # 27x27, 6 pixels over
        ("ViT-SO400M-14-SigLIP", {"embed_dim": 64, "depth": 2, "num_heads": 2}),  # 16x16
        ("ViT-SO400M-16-SigLIP2-256", {"embed_dim": 72, "depth": 2, "num_heads": 3}),  # tanh GELU
    ],
)
@torch.inference_mode()
def test_a_narrow_twin_equals_open_clips_trunk(name: str, sizes: dict[str, int]) -> None:
    trunk = trunk_of(name, **sizes).eval()
    randomise(trunk, seed=1)
    tower = tower_like(trunk)
    size = trunk.patch_embed.img_size[0]
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))
    assert relative(tower(pixels).flatten(1, 2), trunk.forward_features(pixels)) <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
@torch.inference_mode()
def test_the_real_so400m_trunk_equals_open_clips() -> None:
    trunk = trunk_of("ViT-SO400M-14-SigLIP-384").eval()
    randomise(trunk, seed=1)
    tower = tower_like(trunk)
    pixels = torch.randn(1, 3, 384, 384, generator=torch.Generator().manual_seed(2))
    ours, theirs = tower(pixels).flatten(1, 2), trunk.forward_features(pixels)
    assert ours.shape == (1, 729, 1152)
    print(f"relative difference {relative(ours, theirs):.2e}")
    assert relative(ours, theirs) <= 1e-5


@pytest.mark.slow
def test_the_index_is_what_open_clips_registry_and_timm_say() -> None:
    assert json.loads(INDEX.read_text()) == script.build()


def test_an_unknown_tower_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(EncoderConfigError, match="ViT-B-16-SigLIP, "):
        open_clip_tower("ViT-B-16")


@torch.inference_mode()
def test_fast_tanh_gelu_equals_torchs_within_rounding() -> None:
    x = torch.linspace(-12, 12, 20_001)
    expected = torch.nn.functional.gelu(x.double(), approximate="tanh")
    assert (activate(x.clone(), "gelu_tanh").double() - expected).abs().max() < 2e-6
    extreme = torch.tensor([-1e30, -60.0, 0.0, 60.0, 1e30])
    assert activate(extreme.clone(), "gelu_tanh").tolist() == [0.0, 0.0, 0.0, 60.0, pytest.approx(1e30)]


def test_training_takes_the_differentiable_path() -> None:
    x = torch.randn(8, requires_grad=True)
    activate(x, "gelu_tanh").sum().backward()
    assert x.grad is not None


def test_cost_shape_counts_the_parameters_that_exist() -> None:
    """The articles' figure: 2 * P * tokens + 4 * L * tokens^2 * d, with P about 0.4 G for SO400M."""
    config = EncoderConfig(
        open_clip_tower("ViT-SO400M-14-SigLIP-384"), ConnectorConfig("average_pool", 2, 64)
    )
    with torch.device("meta"):
        tower = Tower(config.tower)
        connector = build_connector(config.connector, config.tower)
    on_patches = sum(weight.numel() for name, weight in tower.named_parameters() if name != "pos_embed")
    on_tokens = sum(weight.numel() for weight in connector.parameters())
    assert config.shape.patch_params == on_patches
    assert config.shape.connector_params == on_tokens
    attention = 4 * 27 * 729**2 * 1152
    assert (
        config.shape.flops(config.geometry.squares(1))
        == 2 * on_patches * 729 + attention + 2 * on_tokens * 196
    )


@torch.inference_mode()
def test_scores_of_a_large_image_are_never_all_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 2, 100, 8, generator=torch.Generator().manual_seed(1))
    whole, blocks = attend(q, k, v), []
    plain = torch.nn.functional.scaled_dot_product_attention

    def counted(part: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        blocks.append(part.shape[2])
        return plain(part, *rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    monkeypatch.setattr("encoder.tower.SCORE_BYTES", 2 * 100 * 4 * 30)
    torch.testing.assert_close(attend(q, k, v), whole, rtol=1e-5, atol=1e-6)
    assert blocks == [30, 30, 30, 10]
