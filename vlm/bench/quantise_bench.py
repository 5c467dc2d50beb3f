"""`vlm bench quantise`: what smaller weights and KV cost in right answers and save in bytes and time.

Accuracy: the default model asked about held-out documents as `vlm ask` asks, always the same questions.
Bytes: the loaded engine's buffers beside the planner's figures. Time: a decoder of SmolLM2-135M's shape,
whose weights are read from memory on every step; CPU seconds, storages in turns.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from encoder.encoder_config import Arithmetic
from llm.cost import Precision, kv_bytes_per_token, kv_element_bytes
from llm.storage import KvStorage, WeightStorage
from vlm.bench.accuracy_bench import Answerer
from vlm.bench.decode_bench import smollm2_checkpoint
from vlm.bench.decoding.steps import BLOCK, CONTEXT, STEPS, Streams, cpu_seconds_per_step
from vlm.bench.harness.results import report, result, say, spread
from vlm.checkpoint import Checkpoint
from vlm.config import DEFAULT_MODEL, EngineOptions
from vlm.loading import load_backend
from vlm.plan.catalog import load_model
from vlm.plan.plan_options import stored
from vlm.train.evaluate import Report, evaluate, held_out_documents

FIELDS = ("total", "date", "seller", "number", "price")
DOCUMENTS = 200


@dataclass(frozen=True, slots=True)
class StoredWeights:
    weights: WeightStorage
    kv: KvStorage
    tower: Arithmetic = "float32"  # of its products

    @property
    def name(self) -> str:
        """Figures' suffix."""
        tower = "" if self.tower == "float32" else f"_tower_{self.tower}"
        return f"weights_{self.weights}_kv_{self.kv}{tower}"


FULL = StoredWeights("float32", "float32")
STORED = (
    FULL,
    StoredWeights("bfloat16", "bfloat16"),
    StoredWeights("float16", "float16"),
    StoredWeights("float32", "int8"),
    StoredWeights("int8", "float32"),
    StoredWeights("int4", "float32"),
    StoredWeights("int8", "int8"),
    StoredWeights("int4", "int8"),
)
ANSWERING = (*STORED, StoredWeights("float32", "float32", "bfloat16"))
TIMED = (
    FULL,
    StoredWeights("bfloat16", "bfloat16"),
    StoredWeights("int8", "int8"),
    StoredWeights("int4", "int8"),
)


def answers_of(how: StoredWeights, documents: int) -> tuple[Report, list[str]]:
    """The default model's marks, and its answers in the order of the questions."""
    answerer = Answerer(
        EngineOptions(weights=how.weights, kv=how.kv, kv_cache_mb=64, encoder_dtype=how.tower)
    )
    given: list[str] = []

    def ask(image: Image.Image, question: str) -> str:
        given.append(answerer(image, question))
        return given[-1]

    try:
        return evaluate(ask, held_out_documents(documents)), given
    finally:
        answerer.close()


def field_counts(found: Report) -> tuple[int, int]:
    """(right, asked) over FIELDS."""
    pairs = [pair for name, pair in found.exact.items() if name.partition("/")[2] in FIELDS]
    return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)


def accuracy(documents: int) -> dict[str, dict[str, Any]]:
    """Every storage on the same questions; points and equal answers are against float32."""
    results: dict[str, dict[str, Any]] = {}
    first: list[str] = []
    full = 0.0
    for number, how in enumerate(ANSWERING, 1):
        say(f"quantise: answers with {how.name} ({number} of {len(ANSWERING)})")
        found, given = answers_of(how, documents)
        right, asked = field_counts(found)
        if how == FULL:
            first, full = given, right / asked
        counts = found.exact.values()
        results[f"field_accuracy_{how.name}"] = result(
            right / asked,
            "fraction",
            model="vlm-default",
            dtype="float32",
            threads=1,
            batch=1,
            documents=documents,
            fields_asked=asked,
            points_over_float32=round(100 * (right / asked - full), 2),
            all_questions=round(sum(c[0] for c in counts) / sum(c[1] for c in counts), 4),
            questions=len(given),
            equal_answers=round(sum(a == b for a, b in zip(given, first, strict=True)) / len(given), 4),
            **{field: round(found.accuracy(field), 4) for field in FIELDS},
        )
    return results


def sizes() -> dict[str, dict[str, Any]]:
    """Bytes of the engine's buffers, and what the planner says of them."""
    directory = Path(DEFAULT_MODEL)
    model, config = load_model("default"), Checkpoint.read(directory).decoder
    context = config.max_positions // BLOCK * BLOCK
    results = {}
    for how in STORED:
        engine: Any = load_backend(directory, num_blocks=context // BLOCK, weights=how.weights, kv=how.kv)
        if not hasattr(engine, "held_bytes"):
            raise RuntimeError("this benchmark needs the native backend")
        planned = stored(model, model.decoder, Precision(), how.weights, how.kv)
        about = {"model": "vlm-default", "dtype": how.name, "threads": 1, "batch": 1, "context": context}
        results[f"weight_bytes_{how.name}"] = result(
            engine.held_bytes,
            "B",
            **about,
            planned=planned.held_bytes,
            read_per_step=engine.weight_bytes,
        )
        results[f"kv_bytes_per_token_{how.name}"] = result(
            engine.kv_bytes / context,
            "B",
            **about,
            planned=kv_bytes_per_token(model.decoder, kv_element_bytes(how.kv, config.head_dim)),
        )
    return results


def speed(directory: Path, rounds: int, batch: int) -> dict[str, dict[str, Any]]:
    """Tokens per CPU second of every storage over float32's, in the same rounds."""
    blocks = batch * ((CONTEXT + STEPS * 2) // BLOCK + 2)
    streams, read = {}, {}
    for how in TIMED:
        backend: Any = load_backend(directory, num_blocks=blocks, weights=how.weights, kv=how.kv)
        streams[how], read[how] = Streams(backend, batch, CONTEXT), backend.weight_bytes
    seconds: dict[StoredWeights, list[float]] = {how: [] for how in TIMED}
    for number in range(rounds + 1):  # the first one warms up
        for how, one in streams.items():
            one.restart()
            taken = cpu_seconds_per_step(one.step)
            if number:
                seconds[how].append(taken)
    results = {}
    for how in TIMED:
        ratios = [full / ours for full, ours in zip(seconds[FULL], seconds[how], strict=True)]
        results[f"decode_over_fp32_b{batch}_{how.name}"] = result(
            statistics.median(ratios),
            "x",
            model="SmolLM2-135M shape, random",
            dtype=how.name,
            threads=1,
            batch=batch,
            context=CONTEXT,
            ms_per_step=statistics.median(seconds[how]) * 1e3,
            tokens_per_cpu_s=batch / statistics.median(seconds[how]),
            weight_bytes_per_step=read[how],
            spread=spread(ratios),
        )
    return results


def run(quick: bool = False) -> dict[str, Any]:
    """All storages on the native backend. Raises NativeUnavailable's reason as RuntimeError."""
    torch.set_num_threads(1)
    results = sizes() | accuracy(20 if quick else DOCUMENTS)
    with smollm2_checkpoint() as directory:
        for batch in (1, 8):
            say(f"quantise: decode in batches of {batch}")
            results |= speed(directory, 2 if quick else 7, batch)
    results["int8_over_fp32_b1"] = results[f"decode_over_fp32_b1_{StoredWeights('int8', 'int8').name}"]
    return report("quantise", results)
