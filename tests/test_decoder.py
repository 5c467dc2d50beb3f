"""The decoder's logits against transformers' on the same checkpoint directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decoders import CONFIGS, random_decoder, relative_error, run_chunks
from fidelity import DEFAULT_MODEL
from transformers import AutoModelForImageTextToText

from llm.backend.base import StepItem, StepPlan, VisualSlice
from vlm.loading import load_backend

NUM_POSITIONS = 64
LOGITS_BOUND = 1e-3
GAP_EXCUSED = 1e-3


def teacher_forced_differences(got: np.ndarray, want: np.ndarray) -> tuple[int, int]:
    """(positions whose argmax differs at a top-two gap of GAP_EXCUSED or more, those excused)."""
    top = np.sort(want, 1)[:, -2:]
    differs = got.argmax(1) != want.argmax(1)
    excused = differs & (top[:, 1] - top[:, 0] < GAP_EXCUSED)
    return int((differs & ~excused).sum()), int(excused.sum())


def check(got: np.ndarray, want: np.ndarray) -> None:
    top = np.sort(want, 1)[:, -2:]
    gap, error = float(np.median(top[:, 1] - top[:, 0])), relative_error(got, want)
    wrong, excused = teacher_forced_differences(got, want)
    print(f"logits max rel {error:.1e}, argmax differs {wrong}, excused {excused}, median gap {gap:.2f}")
    assert gap > 0.1
    assert error <= LOGITS_BOUND
    assert wrong == 0
    assert excused <= 0.02 * len(want)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    path, reference = random_decoder(tmp_path, name, seed=len(name))
    backend = load_backend(path, num_blocks=16, backend="torch")
    ids = torch.randint(0, reference.config.vocab_size, (NUM_POSITIONS,), generator=torch.manual_seed(7))
    with torch.no_grad():
        want = reference(input_ids=ids[None], use_cache=False).logits[0].numpy()
    got = run_chunks(backend, ids.tolist(), (3, 9, 1, 12, 5), [NUM_POSITIONS])
    check(got, want)


def test_a_position_beyond_the_original_context_equals_transformers(tmp_path: Path) -> None:
    """Rope scaling acts on long positions: 250 of them, original context 64."""
    for name in ("llama_group3_llama3_rope", "llama_yarn_odd_sizes"):
        path, reference = random_decoder(tmp_path, name)
        backend = load_backend(path, num_blocks=20, backend="torch")
        ids = torch.randint(0, 160, (250,), generator=torch.manual_seed(1))
        with torch.no_grad():
            want = reference(input_ids=ids[None], use_cache=False).logits[0].numpy()
        check(run_chunks(backend, ids.tolist(), tuple(range(19)), [250]), want)


def test_default_model_with_visual_rows_equals_transformers() -> None:
    reference = AutoModelForImageTextToText.from_pretrained(DEFAULT_MODEL, dtype=torch.float32).eval()
    backend = load_backend(DEFAULT_MODEL, num_blocks=16, backend="torch")
    generator = torch.manual_seed(3)
    ids = torch.randint(0, 582, (NUM_POSITIONS,), generator=generator)
    ids[5:21] = reference.config.image_token_id
    embedding = reference.get_input_embeddings()
    rows = torch.randn(16, embedding.weight.shape[1], generator=generator) * embedding.weight.std()
    with torch.no_grad():
        embedded = embedding(ids)
        embedded[5:21] = rows
        want = reference(inputs_embeds=embedded[None], use_cache=False).logits[0].numpy()
    visual = VisualSlice(5, rows)
    table = (4, 2, 7, 1)
    whole = backend.execute(StepPlan((StepItem(tuple(ids.tolist()), 0, table, 64, (visual,)),)))
    check(whole, want)
    # The same rows in two chunks that cut the image.
    first = StepItem(tuple(ids[:11].tolist()), 0, table, 11, (VisualSlice(5, rows[:6]),))
    second = StepItem(tuple(ids[11:].tolist()), 11, table, 53, (VisualSlice(0, rows[6:]),))
    parts = [backend.execute(StepPlan((item,))) for item in (first, second)]
    assert relative_error(np.concatenate(parts), want) <= LOGITS_BOUND


def test_bfloat16_follows_transformers_bfloat16(tmp_path: Path) -> None:
    path, reference = random_decoder(tmp_path, "llama_gqa2")
    backend = load_backend(path, num_blocks=16, backend="torch", dtype="bfloat16")
    ids = torch.randint(0, 160, (NUM_POSITIONS,), generator=torch.manual_seed(2))
    with torch.no_grad():
        want = reference(input_ids=ids[None], use_cache=False).logits[0].numpy()
        rounded = reference.to(torch.bfloat16)(input_ids=ids[None], use_cache=False).logits[0].float().numpy()
    got = run_chunks(backend, ids.tolist(), (0, 1, 2, 3), [NUM_POSITIONS])
    # Both are roundings of the same float32 network: as far from it as the other, within a factor of two.
    assert relative_error(got, want) <= 2 * relative_error(rounded, want)
