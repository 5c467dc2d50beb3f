"""A damaged file shows what it says or nothing: never what the process decoded before."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from damaged_images import MARKER, damaged, encode, marked, outcome, picture, valid_images
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiff_files import LONG, SHORT, gray, strips, tiff_file

from preprocess.decode import decode
from preprocess.formats import libtiff
from preprocess.types import ImageError
from vlm.cli.doctor_command import advice, installation

ROOT = Path(__file__).resolve().parent.parent


def outcomes(first: int, count: int, fill: int) -> list[list[str]]:
    """Seed, name and outcome of damaged files, decoded in a process whose fresh memory is full of `fill`."""
    tunables = f"glibc.malloc.perturb={fill ^ 0xFF}:glibc.malloc.tcache_count=0"
    done = subprocess.run(
        [sys.executable, "tests/damaged_images.py", str(first), str(count)],
        cwd=ROOT,
        env={**os.environ, "GLIBC_TUNABLES": tunables, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, *lines = done.stdout.splitlines()
    if found != f"{fill:02x}":
        pytest.skip("malloc(3) is not glibc's here")
    return [line.split("\t") for line in lines]


def assert_no_pixel_is_of_old_memory(first: int, count: int) -> Counter[str]:
    """The same files in two processes with different fresh memory."""
    one, other = outcomes(first, count, 0x11), outcomes(first, count, 0xEE)
    assert len(one) == count
    assert [a for a, b in zip(one, other, strict=True) if a != b] == []
    return Counter("pixels" if len(line[2]) == 64 else line[2] for line in one)


def test_every_valid_file_decodes() -> None:
    assert {name for name, data in valid_images().items() if len(outcome(data)) != 64} == set()


def test_damaged_files_show_no_old_memory() -> None:
    assert_no_pixel_is_of_old_memory(0, 2 * len(valid_images()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_damaged_files_of_every_format_show_no_old_memory() -> None:
    count = int(os.environ.get("VLM_DAMAGED_FILES", "1000"))
    found = assert_no_pixel_is_of_old_memory(10_000, count)
    assert found["pixels"] > count / 10 and found["invalid_image"] > count / 10


def short_strips() -> dict[str, bytes]:
    """Files whose data end before their pixels do, some with an end that looks right."""
    found = {}
    for white_is_zero in (False, True):
        tags = {256: (LONG, [640]), 257: (LONG, [700]), 258: (SHORT, [1]), 277: (SHORT, [1])}
        tags |= {262: (SHORT, [int(not white_is_zero)]), 278: (LONG, [700])}
        row = b"\xff" * 4  # vertical modes: rows like the one above it
        for name, data in (("ends", row), ("bad code", row + bytes(2) + b"\x7f" * 60)):
            name = f"group4 {name} {'white' if white_is_zero else 'black'} is zero"
            found[f"fax, {name}"] = tiff_file(strips({**tags, 259: (SHORT, [4])}, [data]))
        name = f"fax, group3 {'white' if white_is_zero else 'black'} is zero"
        found[name] = tiff_file(strips({**tags, 259: (SHORT, [3])}, [row]))
    page = gray(640, 700)
    for name, compression, data in (
        ("deflate", 8, zlib.compress(bytes(640 * 20))),
        ("deflate cut", 8, zlib.compress(np.random.default_rng(0).bytes(640 * 700))[:9000]),
        ("packbits", 32773, b"\x81\0" * 20),
        ("lzw", 5, b"\x80\x00\x00\x10"),
        ("raw", 1, bytes(640)),
    ):
        found[name] = tiff_file(strips({**page.tags, 259: (SHORT, [compression])}, [data]))
    jpeg = encode(picture("L", 640, 320), "JPEG")
    found["jpeg"] = tiff_file(strips({**gray(640, 704).tags, 259: (SHORT, [7])}, [jpeg]))
    return found


@pytest.mark.parametrize("name", short_strips())
def test_a_damaged_file_decodes_alike_twice_in_a_warmed_process(name: str) -> None:
    data = short_strips()[name]
    found = []
    for width, height in ((640, 700), (700, 900), (80, 700)):
        for image in (marked(width, height), encode(Image.open(io.BytesIO(marked(width, height))), "TIFF")):
            decode(image)
            found.append(outcome(data))
            if len(found[-1]) == 64:
                assert MARKER not in decode(data).convert("L").tobytes()
    assert len(set(found)) == 1


@pytest.mark.parametrize("name", [name for name in short_strips() if name.startswith("fax")])
def test_missing_rows_of_a_fax_page_are_white(name: str) -> None:
    assert (np.asarray(decode(short_strips()[name]))[40:] == 255).all()


@pytest.mark.parametrize("name", [name for name in short_strips() if not name.startswith("fax")])
def test_missing_rows_of_other_images_are_refused(name: str) -> None:
    assert outcome(short_strips()[name]) == "invalid_image"


@pytest.mark.parametrize("white_is_zero", [False, True])
@pytest.mark.parametrize("rest", [b"", bytes(400)])
def test_rows_that_a_damaged_fax_page_has_are_kept(white_is_zero: bool, rest: bytes) -> None:
    page = Image.new("1", (640, 300), 1)
    page.paste(picture("1"), (20, 20))
    page.paste(0, (0, 200, 640, 300))
    stored = Image.fromarray(np.asarray(page) ^ white_is_zero)
    data = encode(stored, "TIFF", compression="group4", strip_size=1 << 20)
    whole = Image.open(io.BytesIO(data))
    (start,), (count,) = whole.tag_v2[273], whole.tag_v2[279]
    tags = {256: (LONG, [640]), 257: (LONG, [300]), 258: (SHORT, [1]), 259: (SHORT, [4])}
    tags |= {262: (SHORT, [int(not white_is_zero)]), 278: (LONG, [300])}
    expected = np.asarray(page.convert("RGB"))
    strip = data[start : start + count]
    assert (np.asarray(decode(tiff_file(strips(tags, [strip])))) == expected).all()
    seen = np.asarray(decode(tiff_file(strips(tags, [strip[: count // 2] + rest]))))
    assert (seen[:60] == expected[:60]).all() and (seen[250:] == 255).all()


def test_a_damaged_fax_page_in_many_strips_is_refused() -> None:
    """A strip that is short shows the one before it."""
    data = bytearray(encode(picture("1"), "TIFF", compression="group4", strip_size=500))
    image = Image.open(io.BytesIO(data))
    start, count = image.tag_v2[273][1], image.tag_v2[279][1]
    data[start + count // 2 : start + count] = bytes(count - count // 2)
    assert outcome(bytes(data)) == "invalid_image"


@pytest.mark.parametrize("mode", ["1", "L", "P", "PA", "RGB", "RGBA", "CMYK", "LA", "I;16", "LAB", "F"])
def test_pixels_are_those_of_pil_itself(mode: str) -> None:
    """Whatever Pillow reads TIFFs."""
    if mode == "F":
        image = Image.fromarray(np.asarray(picture("L"), np.float32) / 255)
    elif mode == "PA":
        image = picture("P").convert("PA")
    else:
        image = picture(mode)
    with_pil = decode(encode(image, "TIFF", compression="tiff_lzw"))
    if mode in ("1", "L", "P", "RGB", "CMYK"):
        assert np.array_equal(np.asarray(with_pil), np.asarray(image.convert("RGB")))
    assert np.array_equal(np.asarray(with_pil), np.asarray(decode(encode(image, "TIFF"))))


def test_compressed_tiffs_are_refused_where_no_pillow_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libtiff, "_FIRST_CLEAN", 99)
    assert outcome(encode(picture(), "TIFF", compression="tiff_lzw")) == "unsupported_image_format"
    assert len(outcome(encode(picture(), "TIFF"))) == 64
    found = installation()
    assert found["imaging"]["compressed_tiffs"] == "refused"
    assert any("compressed TIFFs are refused" in line for line in advice(found))


def test_what_libtiff_says_is_not_written_to_the_servers_log(capfd: pytest.CaptureFixture[str]) -> None:
    for data in short_strips().values():
        outcome(data)
    assert capfd.readouterr() == ("", "")


EXTREMES = [2**63, 2**64 - 2, 2**63 - 1, 2**31, 2**31 - 1, 2**32 - 1, 2**16 - 1, 0]


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(valid_images())), st.data())
def test_any_number_in_a_header_gives_pixels_or_a_typed_error(name: str, draw: st.DataObject) -> None:
    data = bytearray(valid_images()[name])
    for _ in range(draw.draw(st.integers(1, 3))):
        size = draw.draw(st.sampled_from([2, 4, 8]))
        value = draw.draw(st.sampled_from(EXTREMES)) % 256**size
        header = st.integers(0, 200) | st.integers(max(0, len(data) - 300), len(data) - size)
        at = min(draw.draw(header), len(data) - size)
        data[at : at + size] = value.to_bytes(size, draw.draw(st.sampled_from(["little", "big"])))
    try:
        decode(bytes(data))
    except ImageError as error:
        assert "0x" not in error.message and "Error" not in error.message


def test_seeds_damage_every_format() -> None:
    names = {damaged(seed)[0] for seed in range(len(valid_images()))}
    assert names == valid_images().keys()
