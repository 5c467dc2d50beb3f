"""Pages of PDFs and TIFFs: the right pixels, the caps, and files that mean harm."""

from __future__ import annotations

import asyncio
import io
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from caption_fakes import page_image, pdf, tiff
from hypothesis import given, settings
from hypothesis import strategies as st
from pdf_files import raw_pdf
from PIL import Image, ImageSequence

from preprocess.decode import decode
from preprocess.formats.tiff import is_tiff, page_offsets
from preprocess.formats.tiff_page import page_file
from preprocess.pages import DrawnPage, PageLimits, PdfPages, is_pdf, page_scale
from preprocess.types import ImageError
from workers.local import page_drawing
from workers.local.page_drawing import PageRenderer

MANY = 1 << 30


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(decode(data))


def frames_of(data: bytes) -> list[np.ndarray]:
    """Every frame of a TIFF, by a file that holds no other."""
    frames = []
    with Image.open(io.BytesIO(data)) as file:
        for frame in ImageSequence.Iterator(file):
            alone = io.BytesIO()
            frame.save(alone, "PNG" if frame.mode != "CMYK" else "TIFF")
            frames.append(pixels(alone.getvalue()))
    return frames


def split(data: bytes) -> list[bytes]:
    return [page_file(data, offset, MANY) for offset in page_offsets(data, 100)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "tiff_lzw"},
        {"compression": "tiff_adobe_deflate"},
        {"compression": "jpeg"},
        {"compression": "packbits"},
        {"big_tiff": True},
    ],
    ids=str,
)
def test_each_tiff_page_decodes_to_the_pixels_of_its_frame(options: dict[str, object]) -> None:
    data = tiff([1, 2, 3], **options)
    pages = split(data)
    assert len(pages) == 3
    for index, page in enumerate(pages):
        assert is_tiff(page)
        assert np.array_equal(pixels(page), frames_of(data)[index])
    assert not np.array_equal(pixels(pages[0]), pixels(pages[1]))


@pytest.mark.parametrize("mode", ["1", "L", "P", "I;16", "RGBA", "CMYK", "LA"])
def test_tiff_pages_of_every_mode_keep_their_pixels(mode: str) -> None:
    frames = [page_image(number).convert("L" if mode == "I;16" else mode) for number in (1, 2)]
    if mode == "I;16":
        frames = [Image.fromarray(np.asarray(frame, dtype=np.uint16) * 257) for frame in frames]
    buffer = io.BytesIO()
    frames[0].save(buffer, "TIFF", save_all=True, append_images=frames[1:])
    data = buffer.getvalue()
    for index, page in enumerate(split(data)):
        assert np.array_equal(pixels(page), frames_of(data)[index])


def test_a_big_endian_tiff_and_its_orientation_survive() -> None:
    picture = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3)
    data = bytearray(b"MM\x00*" + struct.pack(">I", 8 + picture.nbytes) + picture.tobytes())
    entries = [(256, 3, 1, 4 << 16), (257, 3, 1, 6 << 16), (258, 3, 3, 0), (259, 3, 1, 1 << 16)]
    entries += [(262, 3, 1, 2 << 16), (273, 4, 1, 8), (274, 3, 1, 6 << 16), (277, 3, 1, 3 << 16)]
    entries += [(278, 3, 1, 6 << 16), (279, 4, 1, picture.nbytes)]
    extra_at = len(data) + 2 + 12 * len(entries) + 4
    data += struct.pack(">H", len(entries))
    for tag, kind, count, value in entries:
        data += struct.pack(">HHII", tag, kind, count, extra_at if tag == 258 else value)
    data += struct.pack(">I", 0) + struct.pack(">HHH", 8, 8, 8)
    whole = bytes(data)
    (page,) = split(whole)
    assert page[:2] == b"MM"
    assert pixels(page).shape == (4, 6, 3)
    assert np.array_equal(pixels(page), pixels(whole))


def test_a_tiff_whose_chain_runs_in_a_circle_ends() -> None:
    data = bytearray(tiff([1, 2]))
    first, second = page_offsets(bytes(data), 100)
    (entries,) = struct.unpack_from("<H", data, second)
    struct.pack_into("<I", data, second + 2 + 12 * entries, first)
    assert page_offsets(bytes(data), 100) == [first, second]


def test_page_counts_and_sizes_are_capped() -> None:
    data = tiff([1, 2, 3])
    with pytest.raises(ImageError) as too_many:
        page_offsets(data, 2)
    assert too_many.value.code == "too_many_pages"
    with pytest.raises(ImageError) as too_large:
        page_file(data, page_offsets(data, 3)[0], 1000)
    assert too_large.value.code == "image_too_large"


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_damaged_tiff_gives_pages_or_a_typed_error(data: st.DataObject) -> None:
    whole = bytearray(tiff([1, 2]))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        for offset in page_offsets(damaged, 50):
            assert is_tiff(page_file(damaged, offset, 1 << 20))
    except ImageError as error:
        assert error.code in (
            "invalid_image",
            "too_many_pages",
            "image_too_large",
            "unsupported_pixel_format",
        )


@given(st.floats(0.01, 1e7), st.floats(0.01, 1e7), st.integers(18, 1200), st.integers(10_000, 50_000_000))
def test_a_page_never_has_more_pixels_than_allowed(width: float, height: float, dpi: int, cap: int) -> None:
    limits = PageLimits(dpi=dpi, max_pixels=cap)
    scale = page_scale(width, height, limits)
    assert 0 < scale <= dpi / 72
    assert -(-width * scale // 1) * -(-height * scale // 1) <= cap


@pytest.mark.parametrize(("width", "height"), [(0, 10), (10, -1), (float("nan"), 1), (float("inf"), 1)])
def test_a_page_without_area_is_refused(width: float, height: float) -> None:
    with pytest.raises(ImageError):
        page_scale(width, height, PageLimits())


def test_pdf_pages_come_out_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf([1, 2, 3]))
    assert is_pdf(path.read_bytes())

    async def run() -> list[bytes]:
        renderer = PageRenderer(PageLimits(dpi=96))
        try:
            count = await renderer.count(str(path))
            return [(await renderer.render(str(path), index)).png for index in range(count)]
        finally:
            await renderer.close()

    pages = asyncio.run(run())
    assert len(pages) == 3
    for number, page in zip((1, 2, 3), pages, strict=True):
        drawn = pixels(page).astype(int)
        assert drawn.shape == (96, 96, 3)
        assert np.abs(drawn - np.asarray(page_image(number), dtype=int)).mean() < 6  # JPEG inside the PDF


def test_dpi_and_the_pixel_cap_set_the_size(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf([1]))  # 72 x 72 points
    assert Image.open(io.BytesIO(PdfPages(str(path), PageLimits(dpi=300)).render(0).png)).size == (300, 300)
    capped = Image.open(io.BytesIO(PdfPages(str(path), PageLimits(dpi=300, max_pixels=10_000)).render(0).png))
    assert 9_000 < capped.width * capped.height <= 10_000


def code_of(path: Path, limits: PageLimits | None = None, page: int = 0) -> str:
    async def run() -> str:
        renderer = PageRenderer(limits)
        try:
            await renderer.count(str(path))
            await renderer.render(str(path), page)
        except ImageError as error:
            assert str(path) not in error.message and "<" not in error.message
            return error.code
        finally:
            await renderer.close()
        return "fine"

    return asyncio.run(run())


def test_refusals_of_pdfs_have_codes_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(b"%PDF-1.7 nothing else")
    assert code_of(path) == "invalid_pdf"
    path.write_bytes(pdf([1, 2, 3]))
    assert code_of(path, PageLimits(max_pages=2)) == "too_many_pages"
    assert code_of(path, page=3) == "invalid_page"
    key = "00" * 32
    encrypt = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{key}> /U <{key}> /P -4 >> /ID [<00> <00>] "
    path.write_bytes(raw_pdf("", trailer=encrypt))
    assert code_of(path) == "encrypted_pdf"
    path.unlink()
    assert code_of(path) == "unreadable_file"


def test_a_gigantic_page_is_drawn_small(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(raw_pdf("0 0 9 9 re f", media_box="0 0 200000 200000"))
    assert code_of(path, PageLimits(max_pixels=1_000_000)) == "fine"


def test_a_page_that_draws_for_ever_ends_and_the_next_one_is_drawn(tmp_path: Path) -> None:
    slow, good = tmp_path / "slow.pdf", tmp_path / "good.pdf"
    circle = "0 0 m 100 0 100 100 0 100 c f\n"
    slow.write_bytes(raw_pdf(circle * 300_000))
    good.write_bytes(pdf([1]))

    async def run() -> tuple[str, int]:
        renderer = PageRenderer(PageLimits(dpi=300, page_cpu_s=1, page_deadline_s=30))
        try:
            with pytest.raises(ImageError) as caught:
                await renderer.render(str(slow), 0)
            return caught.value.code, len((await renderer.render(str(good), 0)).png)
        finally:
            await renderer.close()

    code, size = asyncio.run(run())
    assert code == "page_timeout" and size > 100


def test_a_process_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall time counts too: a process that sleeps uses no processor time."""
    good = tmp_path / "good.pdf"
    good.write_bytes(pdf([1]))
    frames = "from workers.children.frames import frames_of_parent as frames"
    sleep = "with frames(int(sys.argv[-1])) as f: f.send({}); time.sleep(60)"
    sleeper = [sys.executable, "-c", f"import sys, time; {frames}\n{sleep}"]
    real = page_drawing.command
    limits = PageLimits(page_deadline_s=0.5)

    async def run() -> None:
        renderer = PageRenderer(limits)
        monkeypatch.setattr(page_drawing, "command", lambda _: sleeper)
        with pytest.raises(ImageError) as caught:
            await renderer.count(str(good))
        assert caught.value.code == "page_timeout"
        monkeypatch.setattr(page_drawing, "command", lambda _: real(PageLimits()))
        renderer.limits = PageLimits()
        assert await renderer.count(str(good)) == 1
        await renderer.close()

    asyncio.run(run())


def test_pages_are_drawn_in_several_processes_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf(list(range(8))))

    async def run() -> list[DrawnPage]:
        renderer = PageRenderer(num_processes=2)
        try:
            return await asyncio.gather(*(renderer.render(str(path), index) for index in range(8)))
        finally:
            await renderer.close()

    pages = asyncio.run(run())
    assert len({page.png for page in pages}) == 8
