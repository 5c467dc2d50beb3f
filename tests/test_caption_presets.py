"""Each preset in each format, through the default model."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from vlm.bench.harness.bench_pages import draw_page, encode
from vlm.build import build_local_pipeline
from vlm.caption.caption_job import CaptionJob, run_job
from vlm.caption.presets import FIELDS_SCHEMA, PRESETS, make_question
from vlm.config import EngineOptions

pytestmark = pytest.mark.slow

RECEIPT, INVOICE = 0, 1  # pages of `draw_page`


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize("form", ["jsonl", "csv", "md"])
@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_answers_in_each_format(tmp_path: Path, preset: str, form: str) -> None:
    folder = tmp_path / "scans"
    folder.mkdir()
    for number in (RECEIPT, INVOICE):
        (folder / f"{number}.png").write_bytes(encode(draw_page(number, max_scale=1.0), "PNG"))
    out = tmp_path / f"out.{form}"
    options = EngineOptions(kv_cache_mb=32)
    job = CaptionJob([str(folder)], out, make_question(preset=preset, max_tokens=160), quiet=True)
    assert run_job(job, lambda: build_local_pipeline(options))["errors"] == 0

    journal = out if form == "jsonl" else out.with_name(out.name + ".jsonl")
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    rows.sort(key=lambda row: row["path"])  # the journal's order is that of completion
    texts = [row["text"] for row in rows]
    assert len(rows) == 2 and all(texts) and {row["preset"] for row in rows} == {preset}
    fields = list(FIELDS_SCHEMA["required"]) if preset == "fields" else []
    answers = [json.loads(text) for text in texts] if fields else []
    assert all(set(answer) == set(fields) for answer in answers)
    if form == "csv":
        table = list(csv.DictReader(out.read_text().splitlines(keepends=True)))
        assert [line["text"] for line in table] == texts
        for line, answer in zip(table, answers, strict=False):
            assert {name: line[f"field.{name}"] for name in fields} == answer
    if form == "md":
        written = out.read_text()
        assert written.count("\n## ") + written.startswith("## ") == 2
        fenced = sum(is_json_object(text) for text in texts)  # the model may answer any preset so
        assert written.count("```json") == fenced and (not fields or fenced == 2)
