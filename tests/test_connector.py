import pytest
import torch
from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector

from encoder.connector import CONNECTORS, build_connector, pixel_shuffle
from encoder.encoder_config import ConnectorConfig, EncoderConfig, EncoderConfigError, TowerConfig
from encoder.geometry import VisionGeometry

WIDTH = 8


def tower(side: int) -> TowerConfig:
    return TowerConfig(WIDTH, 1, 1, 8, image_size=side, patch_size=1)


def features(side: int, n: int = 2) -> torch.Tensor:
    return torch.randn(n, side, side, WIDTH, generator=torch.Generator().manual_seed(side))


@pytest.mark.parametrize(("side", "reduction"), [(4, 2), (6, 3), (14, 2), (27, 3), (8, 4), (5, 5), (3, 1)])
def test_pixel_shuffle_joins_patches_in_the_reference_order(side: int, reduction: int) -> None:
    x = features(side)
    reference = Idefics3Connector.pixel_shuffle(None, x.flatten(1, 2), reduction)
    assert torch.equal(pixel_shuffle(x, reduction), reference)


@pytest.mark.parametrize(
    ("side", "reduction"), [(27, 2), (14, 2), (5, 2), (7, 3), (8, 3), (4, 5), (9, 4), (3, 1)]
)
@torch.inference_mode()
def test_average_pool_takes_the_mean_of_the_patches_that_exist(side: int, reduction: int) -> None:
    config = ConnectorConfig("average_pool", reduction, d_model=WIDTH)
    connector = build_connector(config, tower(side))
    connector.proj.load_state_dict({"weight": torch.eye(WIDTH), "bias": torch.zeros(WIDTH)})
    x = features(side)
    cells = -(-side // reduction)
    expected = [
        x[:, r * reduction : (r + 1) * reduction, c * reduction : (c + 1) * reduction].mean(dim=(1, 2))
        for r in range(cells)
        for c in range(cells)
    ]
    torch.testing.assert_close(connector(x), torch.stack(expected, 1), rtol=1e-5, atol=1e-6)


def test_odd_grid_pools_with_ceil() -> None:
    assert VisionGeometry(384, 14, 2).tokens_per_tile == 196
    connector = build_connector(ConnectorConfig("average_pool", 2, d_model=5), tower(27))
    assert connector(features(27)).shape == (2, 196, 5)


@pytest.mark.parametrize("kind", sorted(CONNECTORS))
def test_every_connector_gives_the_tokens_that_the_geometry_counts(kind: str) -> None:
    for side, reduction in ((4, 2), (9, 3), (6, 1)):
        config = ConnectorConfig(
            kind, reduction, d_model=5, intermediate=7 if kind in ("mlp", "gated_mlp") else 0
        )
        whole = EncoderConfig(tower(side), config)
        tokens = build_connector(config, tower(side))(features(side))
        assert tokens.shape == (2, whole.geometry.tokens_per_tile, 5)


def test_mlp_connector_is_two_layers_with_a_gelu_between() -> None:
    connector = build_connector(ConnectorConfig("mlp", 1, d_model=5, intermediate=7), tower(3))
    x = features(3)
    expected = connector.fc2(torch.nn.functional.gelu(connector.fc1(x)))
    torch.testing.assert_close(connector(x), expected.flatten(1, 2))


@pytest.mark.parametrize("kind", ["pixel_shuffle", "mlp"])
def test_a_grid_that_cells_do_not_fill_is_refused_where_patches_are_joined(kind: str) -> None:
    config = ConnectorConfig(kind, 2, d_model=5, intermediate=7 if kind in ("mlp", "gated_mlp") else 0)
    with pytest.raises(EncoderConfigError, match="27x27"):
        EncoderConfig(tower(27), config)


def test_unknown_kinds_and_stray_settings_are_refused() -> None:
    with pytest.raises(EncoderConfigError, match="pixel_shuffle, average_pool, mlp"):
        ConnectorConfig("resampler", 2, d_model=5)  # type: ignore[arg-type]
    with pytest.raises(EncoderConfigError, match="intermediate"):
        ConnectorConfig("average_pool", 2, d_model=5, intermediate=7)
    with pytest.raises(EncoderConfigError, match="at least 1"):
        ConnectorConfig("average_pool", 0, d_model=5)
