"""Weights are mapped strictly: nothing missing, nothing unexpected, no other format."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import random_decoder, run_chunks
from fidelity import CheckpointSpec, random_checkpoint
from safetensors.torch import load_file, save_file

from llm.checkpoint.decoder_weights import WeightsError
from llm.decoder_config import ConfigError
from vlm.loading import load_backend, load_weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return random_decoder(tmp_path, "llama_gqa2")[0]


def edit(path: Path, change: object) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path / "model.safetensors")


def load(path: Path) -> None:
    load_weights(path)


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"]
)
def test_a_missing_tensor_is_named(checkpoint: Path, name: str) -> None:
    edit(checkpoint, lambda t: t.pop(name))
    with pytest.raises(WeightsError, match=name):
        load(checkpoint)


@pytest.mark.parametrize(
    "name", ["model.layers.3.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"]
)
def test_an_unexpected_tensor_is_named(checkpoint: Path, name: str) -> None:
    edit(checkpoint, lambda t: t.update({name: torch.zeros(1)}))
    with pytest.raises(WeightsError, match=name):
        load(checkpoint)


def test_a_misshapen_tensor_is_named(checkpoint: Path) -> None:
    edit(checkpoint, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \[63\] instead of \[64\]"):
        load(checkpoint)


def test_the_vision_half_and_old_rope_buffers_are_passed_over(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path, 0)
    load(path)
    edit(
        path, lambda t: t.update({"model.text_model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    )
    load(path)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    ids, table = list(range(20)), (0, 1)
    logits = []
    for shard_size in ("5GB", "40KB"):
        path, _ = random_decoder(tmp_path / shard_size, "llama_gqa2", shard_size=shard_size)
        logits.append(run_chunks(load_backend(path, num_blocks=2, backend="torch"), ids, table, [20]))
    assert (path / "model.safetensors.index.json").is_file()
    np.testing.assert_array_equal(*logits)


def test_a_tied_checkpoint_may_hold_its_head_and_a_differing_head_wins(tmp_path: Path) -> None:
    path = random_checkpoint(tmp_path, 0, spec=CheckpointSpec(tied=True))
    plain = load_weights(path)
    assert plain.lm_head is plain.embedding
    edit(path, lambda t: t.update({"lm_head.weight": t["model.text_model.embed_tokens.weight"].clone()}))
    same = load_weights(path)
    assert same.lm_head is same.embedding
    edit(path, lambda t: t.update({"lm_head.weight": t["model.text_model.embed_tokens.weight"] + 1}))
    other = load_weights(path)
    assert not torch.equal(other.lm_head, other.embedding)


def test_only_safetensors_are_read(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    with pytest.raises(WeightsError):
        load(checkpoint)


def test_an_index_may_not_point_outside(checkpoint: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="outside"):
        load(checkpoint)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0{broken"])
def test_a_broken_weight_file_is_one_clear_error(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="not readable"):
        load(checkpoint)


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_a_broken_config_is_one_clear_error(checkpoint: Path, content: str | None) -> None:
    (checkpoint / "config.json").unlink()
    if content is not None:
        (checkpoint / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_backend(checkpoint, num_blocks=1)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_blocks": 1, "kv_bytes": 1},
        {"num_blocks": 0},
        {"num_blocks": 1, "dtype": "int8"},
        {"num_blocks": 1, "backend": "jax"},
    ],
)
def test_bad_arguments_are_refused(checkpoint: Path, arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"either|no block|dtype|backend"):
        load_backend(checkpoint, **arguments)  # type: ignore[arg-type]
