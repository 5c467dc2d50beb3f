"""Which files a command line names, in which order."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm.caption.inputs import InputError, InputSource, Skipped, check_arguments, find_sources, natural_key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("scans/p10.png", "scans/p9.png", "scans/P1.JPG", "scans/sub/a.pdf", "scans/notes.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for name in ("scans/.hidden.png", "scans/photo.heic", "scans/rows.jsonl", "other.tiff"):
        Path(name).touch()
    return tmp_path


def paths(*arguments: str) -> list[str]:
    return [source.path for source in find_sources(arguments)]


def test_a_folder_is_walked_in_natural_order(folder: Path) -> None:
    skipped = Skipped()
    found = [source.path for source in find_sources(["scans/"], skipped)]
    assert found == ["scans/P1.JPG", "scans/p9.png", "scans/p10.png", "scans/photo.heic", "scans/sub/a.pdf"]
    assert skipped.num_files == 2 and skipped.examples == ["scans/notes.txt", "scans/rows.jsonl"]


def test_arguments_keep_their_order_and_paths_their_form(folder: Path) -> None:
    assert paths("other.tiff", "scans/sub", "./scans//p9.png") == [
        "other.tiff",
        "scans/sub/a.pdf",
        "scans/p9.png",
    ]
    absolute = str(folder / "other.tiff")
    assert paths(absolute) == [absolute]


def test_globs_are_expanded_where_the_shell_did_not(folder: Path) -> None:
    assert paths("scans/p*.png") == ["scans/p9.png", "scans/p10.png"]
    assert paths("scans/**/*.pdf") == ["scans/sub/a.pdf"]
    assert paths("sc*") == paths("scans")
    Path("odd[1].png").touch()
    assert paths("odd[1].png") == ["odd[1].png"]


def test_a_list_file_names_anything(folder: Path) -> None:
    Path("list.txt").write_text("other.tiff\n\nscans/sub\nscans/p?.png\nnot there.png\n")
    assert paths("@list.txt") == ["other.tiff", "scans/sub/a.pdf", "scans/p9.png", "not there.png"]
    Path("@list.txt").touch()
    assert paths("@list.txt") == ["@list.txt"]


def test_a_batch_file_is_one_when_it_is_named(folder: Path) -> None:
    assert list(find_sources(["scans/rows.jsonl"])) == [InputSource("scans/rows.jsonl", is_batch=True)]


def test_loops_of_links_end(folder: Path) -> None:
    os.symlink("..", "scans/sub/up")
    os.symlink("sub", "scans/again")
    found = paths("scans")
    assert found.count("scans/sub/a.pdf") == 1 and "scans/again/a.pdf" in found


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give files"),
        (["nowhere"], "does not exist"),
        (["scans/*.bmp"], "matches nothing"),
        (["@no.txt"], "list file no.txt does not exist"),
    ],
)
def test_arguments_that_lead_nowhere_are_refused_at_once(
    folder: Path, arguments: list[str], text: str
) -> None:
    with pytest.raises(InputError, match=text):
        check_arguments(arguments)
    check_arguments(["scans", "other.tiff", "scans/p*.png"])


@given(st.lists(st.integers(0, 10**12), unique=True), st.randoms(use_true_random=False))
def test_numbers_in_names_sort_as_numbers(numbers: list[int], rng: Random) -> None:
    names = [f"Page {number}.png" for number in sorted(numbers)]
    shuffled = names.copy()
    rng.shuffle(shuffled)
    assert sorted(shuffled, key=natural_key) == names


@given(st.lists(st.text(max_size=8)))
def test_any_names_can_be_sorted_and_different_names_never_tie(names: list[str]) -> None:
    ordered = sorted(set(names), key=natural_key)
    assert len({natural_key(name) for name in ordered}) == len(ordered)


def test_folders_may_lie_deeper_than_the_stack_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = sys.getrecursionlimit() + 100
    monkeypatch.chdir(tmp_path)
    try:
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("deep.png").touch()
        os.chdir(tmp_path)
        (found,) = paths("d")
        assert found.count("d/") == depth and found.endswith("deep.png")
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # pytest's own way of removing recurses


def test_a_link_to_itself_is_no_document_and_no_end(folder: Path) -> None:
    os.symlink("itself.png", "scans/itself.png")
    os.symlink("itself", "scans/itself")
    found = paths("scans")
    assert "scans/itself.png" in found and "scans/sub/a.pdf" in found


def test_links_that_lead_to_a_folder_over_countless_ways_end(folder: Path) -> None:
    for level in range(40):
        Path(f"scans/{level}").mkdir()
        for way in "ab":
            os.symlink(f"../{level + 1}", f"scans/{level}/{way}")
    Path("scans/40").mkdir()
    Path("scans/40/end.png").touch()
    found = paths("scans")
    assert "scans/40/end.png" in found and any(path.endswith("a/end.png") for path in found)
    assert len(found) < 40 * 16 and len(set(found)) == len(found)


def test_counting_finds_what_the_walk_finds(folder: Path) -> None:
    os.symlink("sub", "scans/again")
    arguments = ["scans", "other.tiff", "scans/*.png"]
    counted = [source.path for source in find_sources(arguments, ordered=False)]
    assert sorted(counted) == sorted(paths(*arguments))


def test_names_of_a_list_may_be_of_any_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [b" two  spaces .png", b"caf\xe9.png", "請.png".encode(), b"- -.png", b"50%{}.png"]
    for name in names:
        Path(os.fsdecode(name)).touch()
    wanted = [os.fsdecode(name) for name in names]
    Path("list.txt").write_bytes(codecs.BOM_UTF8 + b"\r\n".join(names) + b"\r\n")
    assert paths("@list.txt") == wanted
    Path("line\nbreak.png").touch()
    Path("list.txt").write_bytes(b"\0".join([*names, b"line\nbreak.png", b""]))
    assert paths("@list.txt") == [*wanted, "line\nbreak.png"]
    monkeypatch.setattr("vlm.caption.inputs._LIST_BYTES", 24)
    assert paths("@list.txt") == [*wanted, "line\nbreak.png"]
    Path("list.txt").write_bytes(b"   other.tiff \n\n \n")
    assert paths("@list.txt") == ["other.tiff"]


def test_a_list_is_read_twice_and_so_no_pipe(folder: Path) -> None:
    os.mkfifo("pipe")
    with pytest.raises(InputError, match="must be a regular file"):
        check_arguments(["@pipe"])
    with pytest.raises(InputError, match="stdin"):
        check_arguments(["-"])
