"""A run: every page one row, equal pages once, faults contained, memory bounded."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
from caption_fakes import FakeEngine, default_spec, pdf, png, rows_of, run, tiff

from llm.request import Event, Failed, Request
from preprocess.probe import probe
from vlm.caption.caption_runner import CaptionRun, RunOptions
from vlm.caption.page_answers import EngineGone
from vlm.caption.presets import make_question


def by_place(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    rows = rows_of(out)
    places = {(row["path"], row["page"]): row for row in rows}
    assert len(places) == len(rows)
    return places


def key_of(data: bytes) -> str:
    spec = default_spec()
    return spec.visual_key(probe(data).sha256, spec.preprocess_spec("auto"))[:12]


def test_every_page_of_every_kind_gets_its_row(out: Path) -> None:
    Path("in/a.png").write_bytes(png(1))
    Path("in/b.pdf").write_bytes(pdf([2, 3, 4]))
    Path("in/c.tif").write_bytes(tiff([5, 6]))
    Path("in/d.tiff").write_bytes(tiff([7]))
    stats = run(out)
    rows = by_place(out)
    assert sorted(rows) == [
        ("in/a.png", 1), ("in/b.pdf", 1), ("in/b.pdf", 2), ("in/b.pdf", 3),
        ("in/c.tif", 1), ("in/c.tif", 2), ("in/d.tiff", 1),
    ]  # fmt: skip
    assert stats.pages_done == 7 and stats.errors == 0
    assert len({row["text"] for row in rows.values()}) == 7
    row = rows["in/a.png", 1]
    assert row["text"] == key_of(png(1)) and row["page_count"] == 1 and row["finish_reason"] == "stop"
    assert (
        row["usage"]["completion_tokens"] == 4 and row["timings"]["total_ms"] > 0 and row["model"] == "fake"
    )
    assert rows["in/b.pdf", 3]["page_count"] == 3
    assert len({row["id"] for row in rows.values()}) == 7 and all(len(r["id"]) == 32 for r in rows.values())


def test_the_same_command_does_nothing_twice(out: Path) -> None:
    Path("in/a.png").write_bytes(png(1))
    Path("in/b.pdf").write_bytes(pdf([2, 3]))
    Path("in/broken.png").write_bytes(png(4)[:60])
    run(out)
    before = out.read_bytes()
    engine = FakeEngine()
    stats = run(out, engine=engine)
    assert out.read_bytes() == before
    assert not engine.submitted
    assert (stats.pages_done, stats.pages_kept, stats.errors_kept) == (0, 4, 1)


def test_only_missing_pages_are_done_after_an_interruption(out: Path) -> None:
    Path("in/b.pdf").write_bytes(pdf([2, 3, 4]))
    run(out)
    rows = rows_of(out)
    out.write_text("".join(json.dumps(row) + "\n" for row in rows if row["page"] != 2))
    engine = FakeEngine()
    run(out, engine=engine)
    assert len(engine.submitted) == 1
    assert sorted(by_place(out)) == [("in/b.pdf", page) for page in (1, 2, 3)]


def test_changed_files_are_done_again_and_replace_their_rows(out: Path) -> None:
    Path("in/a.png").write_bytes(png(1))
    Path("in/b.pdf").write_bytes(pdf([2, 3, 4]))
    Path("in/c.png").write_bytes(png(9))
    run(out)
    unchanged = by_place(out)["in/c.png", 1]
    Path("in/a.png").write_bytes(png(5))
    Path("in/b.pdf").write_bytes(pdf([6, 7]))
    engine = FakeEngine()
    run(out, engine=engine)
    rows = by_place(out)
    assert sorted(rows) == [("in/a.png", 1), ("in/b.pdf", 1), ("in/b.pdf", 2), ("in/c.png", 1)]
    assert rows["in/a.png", 1]["text"] == key_of(png(5))
    assert rows["in/c.png", 1] == unchanged
    assert len(engine.submitted) == 3


def test_another_model_answers_again_another_question_beside(out: Path) -> None:
    Path("in/a.png").write_bytes(png(1))
    run(out)
    first = rows_of(out)[0]
    run(out, revision="s" * 32)
    (second,) = rows_of(out)
    assert second["id"] != first["id"]
    run(out, revision="s" * 32, question=make_question(prompt="What colour is it?"))
    assert [row["preset"] for row in rows_of(out)] == ["caption", "custom"]


def test_equal_pages_are_done_once_in_a_run_and_across_runs(out: Path) -> None:
    for name in ("a", "b", "c"):
        Path(f"in/{name}.png").write_bytes(png(1))
    Path("in/d.pdf").write_bytes(pdf([2, 2, 3]))
    engine = FakeEngine(delay_s=0.05)
    stats = run(out, engine=engine)
    assert len(engine.submitted) == 3 and stats.duplicates == 3
    rows = by_place(out)
    assert len({rows[f"in/{name}.png", 1]["text"] for name in "abc"}) == 1
    originals = {row["id"] for row in rows.values() if "duplicate_of" not in row}
    assert {row["duplicate_of"] for row in rows.values() if "duplicate_of" in row} <= originals
    Path("in/e.png").write_bytes(png(1))
    again = FakeEngine()
    run(out, engine=again)
    assert not again.submitted and by_place(out)["in/e.png", 1]["text"] == key_of(png(1))


def test_broken_inputs_become_one_error_row_each_with_fixed_texts(out: Path) -> None:
    good = png(1)
    Path("in/good.png").write_bytes(good)
    broken = {
        "cut.png": (png(2)[:-60], "invalid_image"),
        "empty.jpg": (b"", "empty_image"),
        "text.png": (b"hello", "unsupported_image_format"),
        "photo.heic": (b"\0\0\0\x18ftypheic", "unsupported_image_format"),
        "broken.pdf": (b"%PDF-1.4 nothing", "invalid_pdf"),
        "broken.tif": (tiff([3, 4])[:12], "invalid_image"),
    }
    for name, (data, _) in broken.items():
        Path("in", name).write_bytes(data)
    stats = run(out)
    rows = by_place(out)
    assert {
        path.removeprefix("in/"): row["error"]["code"] for (path, _), row in rows.items() if "error" in row
    } == {name: code for name, (_, code) in broken.items()}
    assert rows["in/good.png", 1]["text"] == key_of(good)
    assert stats.errors == len(broken)
    for row in rows.values():
        message = row.get("error", {}).get("message", "")
        assert "in/" not in message and "<" not in message and "Traceback" not in message


def test_a_file_that_can_not_be_read_keeps_its_rows_and_is_tried_again(out: Path) -> None:
    path = Path("in/a.png")
    path.write_bytes(png(1))
    run(out)
    path.unlink()
    os.symlink("nowhere", path)
    stats = run(out)
    assert stats.errors == 1
    rows = by_place(out)
    assert rows["in/a.png", 0]["error"]["code"] == "unreadable_file" and "text" in rows["in/a.png", 1]
    path.unlink()
    path.write_bytes(png(1))
    assert run(out).pages_kept == 1
    assert sorted(by_place(out)) == [("in/a.png", 1)]


def test_retry_errors_tries_settled_errors_again(out: Path) -> None:
    Path("in/a.png").write_bytes(b"junk")
    run(out)
    assert run(out).errors_kept == 1
    assert run(out, options=RunOptions(retry_errors=True)).errors == 1
    assert len(rows_of(out)) == 1


def test_an_engine_that_dies_is_waited_for_and_its_pages_tried_again(out: Path) -> None:
    for number in range(4):
        Path(f"in/{number}.png").write_bytes(png(number))
    deaths = iter(range(2))

    def die(request: Request) -> Event | None:
        return Failed(request.id, "engine_died", "It died.") if next(deaths, None) is not None else None

    stats = run(out, engine=FakeEngine(die))
    assert stats.errors == 0 and len(by_place(out)) == 4


def test_a_page_that_kills_the_engine_fails_alone_and_a_later_run_tries_it_again(out: Path) -> None:
    for number in range(3):
        Path(f"in/{number}.png").write_bytes(png(number))
    poison = key_of(png(1))

    def die(request: Request) -> Event | None:
        hit = any(span.key.startswith(poison) for span in request.prompt.spans)
        return Failed(request.id, "engine_died", "It died.") if hit else None

    engine = FakeEngine(die)
    stats = run(out, engine=engine)
    assert stats.errors == 1 and by_place(out)["in/1.png", 1]["error"]["code"] == "engine_died"
    assert len(engine.submitted) == 2 + 3
    assert run(out).errors == 0
    assert by_place(out)["in/1.png", 1]["text"] == poison


def test_an_engine_that_stays_away_ends_the_run_with_what_is_done(out: Path) -> None:
    for number in range(8):
        Path(f"in/{number}.png").write_bytes(png(number))
    engine = FakeEngine()

    def leave(request: Request) -> Event | None:
        if len(engine.submitted) > 4:
            engine.ready = False
            return Failed(request.id, "engine_died", "It died.")
        return None

    engine._on_submit = leave
    with pytest.raises(EngineGone):
        run(out, engine=engine, options=RunOptions(window=2))
    assert 1 <= len(rows_of(out)) <= 4
    assert run(out).errors == 0 and len(by_place(out)) == 8


def test_the_window_keeps_the_engine_busy_and_bounds_what_is_under_way(out: Path) -> None:
    for number in range(40):
        Path(f"in/{number}.png").write_bytes(png(number))
    engine = FakeEngine()
    engine.gate.clear()

    def started(caption_run: CaptionRun) -> None:
        async def open_when_full() -> None:
            while engine.running < 6:
                await asyncio.sleep(0.001)
            engine.gate.set()

        asyncio.get_running_loop().create_task(open_when_full())

    run(out, engine=engine, options=RunOptions(window=6), started=started)
    assert engine.max_running == 6
    assert len(by_place(out)) == 40


def test_loaded_bytes_are_bounded_but_a_large_page_still_passes(out: Path) -> None:
    for number in range(10):
        Path(f"in/{number}.png").write_bytes(png(number))
    size = max(path.stat().st_size for path in Path("in").iterdir())
    engine = FakeEngine(delay_s=0.01)
    run(out, engine=engine, options=RunOptions(bytes_under_way=2 * size))
    assert 1 <= engine.max_running <= 3
    Path("in/large.png").write_bytes(png(99, (400, 400)))
    run(out, engine=FakeEngine(), options=RunOptions(bytes_under_way=10))
    assert len(by_place(out)) == 11


def test_the_feed_reads_no_further_than_the_window(out: Path) -> None:
    """Memory does not depend on how many files there are: few are opened while the window is full."""
    for number in range(60):
        Path(f"in/{number:02}.png").write_bytes(png(number))
    engine = FakeEngine()
    engine.gate.clear()
    read_ahead: list[int] = []

    def started(caption_run: CaptionRun) -> None:
        async def look() -> None:
            while engine.running < 4:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            read_ahead.append(caption_run.stats.sources_known)
            engine.gate.set()

        asyncio.get_running_loop().create_task(look())

    run(out, engine=engine, options=RunOptions(window=4), started=started)
    assert 4 <= read_ahead[0] <= 5
    assert len(by_place(out)) == 60


def test_stop_finishes_the_pages_under_way_and_takes_no_new_ones(out: Path) -> None:
    for number in range(30):
        Path(f"in/{number:02}.png").write_bytes(png(number))
    engine = FakeEngine(delay_s=0.01)

    def started(caption_run: CaptionRun) -> None:
        async def stop_soon() -> None:
            while len(engine.submitted) < 8:
                await asyncio.sleep(0.001)
            caption_run.stop()

        asyncio.get_running_loop().create_task(stop_soon())

    run(out, engine=engine, options=RunOptions(window=4), started=started)
    done = len(rows_of(out))
    assert done == len(engine.submitted) and 8 <= done < 30
    again = FakeEngine()
    run(out, engine=again)
    assert len(again.submitted) == 30 - done and len(by_place(out)) == 30


def test_a_file_named_twice_gets_its_rows_once(out: Path) -> None:
    Path("in/a.png").write_bytes(png(1))
    engine = FakeEngine()
    run(out, "in", "in/a.png", "in/*.png", engine=engine)
    assert len(engine.submitted) == 1 and len(rows_of(out)) == 1


def line(custom_id: str, *images: bytes, **body: Any) -> str:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is it?"}]
    for image in images:
        url = "data:image/png;base64," + base64.b64encode(image).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    request = {"model": "m", "messages": [{"role": "user", "content": parts}], **body}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": request}
    )


def test_batch_files_run_line_by_line(out: Path) -> None:
    lines = [
        line("one", png(1), max_tokens=7),
        "not json",
        line("two", png(1), png(2)),
        line("tools", png(1), tools=[{"type": "function", "function": {"name": "f"}}]),
        line("bad", b"no image"),
        line("url").replace("/v1/chat/completions", "/v1/embeddings"),
        line("same body", png(1), max_tokens=7),
    ]
    Path("batch.jsonl").write_text("\n".join(lines) + "\n")
    engine = FakeEngine()
    run(out, "batch.jsonl", engine=engine)
    rows = by_place(out)
    found = {
        page: (row.get("custom_id"), row.get("error", {}).get("code")) for (_, page), row in rows.items()
    }
    assert found == {
        1: ("one", None),
        2: (None, "invalid_json_line"),
        3: ("two", None),
        4: ("tools", "unsupported_parameter"),
        5: ("bad", "unsupported_image_format"),
        6: ("url", "invalid_url"),
        7: ("same body", None),
    }
    assert rows["batch.jsonl", 3]["text"] == f"{key_of(png(1))}\n{key_of(png(2))}"
    same = {rows["batch.jsonl", page]["id"]: rows["batch.jsonl", page] for page in (1, 7)}
    assert sum(row.get("duplicate_of") in same for row in same.values()) == 1
    assert {request.params.max_tokens for request in engine.submitted} == {7, 512}
    again = FakeEngine()
    run(out, "batch.jsonl", engine=again)
    assert not again.submitted
