"""/v1/embeddings by a small model of a folder: equal to what open_clip makes of the same inputs."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import open_clip
import openai
import pytest
import torch
from fake_engine_client import LiveServer, image_part, live_server, png
from PIL import Image
from safetensors.torch import save_file

from llm.text_config import ConfigError
from vlm.config import ServeConfig
from vlm.embedding.embedder import Embedder, EmbedderSource

ADDRESS = "/v1/embeddings"
CONFIG: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 24,
        "custom_text": True,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "patch_size": 16, "head_width": 16},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    },
    "preprocess_cfg": {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "interpolation": "bicubic",
        "resize_mode": "squash",
    },
}


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    torch.manual_seed(3)
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("siglip"), CONFIG)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live_server(config=ServeConfig(embedder=f"open_clip:local-dir:{folder}")) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        yield official


def noise(width: int, height: int) -> bytes:
    rng = np.random.default_rng(width)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@torch.inference_mode()
def test_vectors_are_those_of_open_clip_itself(client: openai.OpenAI, folder: Path) -> None:
    name = f"local-dir:{folder}"
    model, _, transform = open_clip.create_model_and_transforms(name)
    images, texts = [noise(90, 50), noise(20, 70)], [f"text number {number}" for number in range(20)]
    mixed: Any = [texts[0], image_part(images[0]), *texts[1:], image_part(images[1])]
    found = client.embeddings.create(model=f"open_clip:{name}", input=mixed)
    vectors = np.array([item.embedding for item in found.data])
    assert [item.index for item in found.data] == list(range(22)) and vectors.shape == (22, 24)
    pixels = torch.stack([transform(Image.open(io.BytesIO(data))) for data in images])  # type: ignore[operator]
    shown = model.eval().encode_image(pixels, normalize=True).numpy()
    told = model.encode_text(open_clip.get_tokenizer(name)(texts), normalize=True).numpy()
    np.testing.assert_allclose(vectors, [told[0], shown[0], *told[1:], shown[1]], atol=1e-5)
    assert found.usage.prompt_tokens >= 20 * 3


def test_floats_and_base64_are_the_same_numbers(server: LiveServer) -> None:
    one, other = (
        httpx.post(server.url + ADDRESS, json={"input": "Hi", "encoding_format": form}).json()
        for form in ("float", "base64")
    )
    data = np.frombuffer(base64.b64decode(other["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(np.float32(one["data"][0]["embedding"]), data)
    document = httpx.get(f"{server.url}/openapi.json").json()
    schema = {"$ref": "#/components/schemas/EmbeddingList", "components": document["components"]}
    jsonschema.validate(one, schema)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["x"] * 257}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": [[1, 2]]}, "input[0]"),
        ({"input": [image_part(b"nothing")]}, "input[0].image_url.url"),
        (
            {"input": [{"type": "file", "file": {"file_data": "data:application/pdf;base64,aaaa"}}]},
            "input[0].type",
        ),
        ({"input": [image_part(png())] * 17}, "input"),
        ({"dimensions": 5}, "dimensions"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_can_not_be_embedded_is_refused_with_its_place(
    server: LiveServer, change: dict[str, Any], param: str
) -> None:
    told = httpx.post(server.url + ADDRESS, json={"input": "Hi", **change})
    assert told.status_code in (400, 404) and told.json()["error"]["param"] == param, told.text
    assert server.service.embedding == 0


def test_a_server_without_an_embedder_says_how_to_have_one() -> None:
    with live_server() as running:
        told = httpx.post(running.url + ADDRESS, json={"input": "Hi", "model": "any"})
    assert told.status_code == 400 and told.json()["error"]["code"] == "no_embedder"
    assert "--embedder" in told.json()["error"]["message"]


def test_no_more_wait_than_there_is_room_for(server: LiveServer) -> None:
    server.service.embedding = 1024
    try:
        assert httpx.post(server.url + ADDRESS, json={"input": "Hi"}).status_code == 429
    finally:
        server.service.embedding = 0


@pytest.mark.parametrize(
    "text",
    [
        "open_clip:",
        "open_clip:ViT-B-16-SigLIP",
        "open_clip:nothing@tag",
        "open_clip:local-dir:/nowhere",
        "clip:x",
    ],
)
def test_what_is_no_embedder_is_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError):
        EmbedderSource.parse(text)


def test_models_that_crop_images_are_refused(tmp_path: Path) -> None:
    crops = {**CONFIG, "preprocess_cfg": {**CONFIG["preprocess_cfg"], "resize_mode": "shortest"}}
    write_model(tmp_path, crops)
    with pytest.raises(ConfigError, match="SigLIP"):
        Embedder(EmbedderSource.parse(f"open_clip:local-dir:{tmp_path}"))


def test_torn_weights_are_one_line(tmp_path: Path) -> None:
    weights = write_model(tmp_path, CONFIG) / "open_clip_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ConfigError, match="can't be loaded") as caught:
        Embedder(EmbedderSource.parse(f"open_clip:local-dir:{tmp_path}"))
    assert "\n" not in str(caught.value)
