"""Text that a PDF holds and its picture does not show; and files that come after one another."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
from caption_fakes import pdf
from pdf_files import pdf_of, raw_pdf, stream
from PIL import Image

from preprocess.pages import DrawnPage, PageLimits, PdfPages
from preprocess.types import ImageError
from workers.children import page_process
from workers.local.page_drawing import PageRenderer

HELVETICA = "/Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >>"
TEXT = "BT /F1 12 Tf 10 50 Td (Total 42.17) Tj ET"
KEY = "00" * 32
CASES = {
    "good": pdf([1]),
    "password": raw_pdf(
        "",
        trailer=f"/Encrypt << /Filter /Standard /V 1 /R 2 /O <{KEY}> /U <{KEY}> /P -4 >> /ID [<00> <00>] ",
    ),
    "other encryption": raw_pdf("", trailer="/Encrypt << /Filter /Other /V 9 >> /ID [<00> <00>] "),
    "no pages": pdf_of(["<< /Type /Catalog /Pages 2 0 R >>", "<< /Type /Pages /Kids [] /Count 0 >>"]),
    "damaged": b"%PDF-1.7 nothing else",
    "empty": b"",
}


def glyphless(text: str, procedure: str, about: str = "") -> bytes:
    """A page whose embedded font draws its every letter by `procedure`."""
    codes = sorted(set(text.encode()))
    names = " ".join(f"{code} /g" for code in codes)
    mapped = "\n".join(f"<{code:02x}> <{code:04x}>" for code in codes)
    to_unicode = (
        "/CIDInit /ProcSet findresource begin begincmap /CMapName /X def 1 begincodespacerange <00> <ff> "
        f"endcodespacerange {len(codes)} beginbfchar\n{mapped}\nendbfchar endcmap end"
    )
    font = (
        "<< /Type /Font /Subtype /Type3 /FontBBox [0 0 1000 1000] /FontMatrix [0.001 0 0 0.001 0 0] "
        f"/CharProcs << /g 6 0 R >> /Encoding << /Type /Encoding /Differences [{names}] >> "
        f"/FirstChar 0 /LastChar 127 /Widths [{'1000 ' * 128}] /ToUnicode 7 0 R /Resources << >> >>"
    )
    content = f"BT /F1 8 Tf 4 50 Td {about} ({text}) Tj ET"
    return raw_pdf(
        content,
        resources="/Font << /F1 5 0 R >>",
        more=(font, stream(f"1000 0 0 0 1000 1000 d1 {procedure}"), stream(to_unicode)),
    )


def draw(folder: Path, data: bytes, dpi: int = 150) -> DrawnPage:
    path = folder / "a.pdf"
    path.write_bytes(data)
    opened = PdfPages(str(path), PageLimits(dpi=dpi))
    try:
        return opened.render(0)
    finally:
        opened.close()


@pytest.mark.parametrize("dpi", [30, 72, 300])
@pytest.mark.parametrize(
    ("name", "data"),
    {
        "blank": raw_pdf(""),
        "shown": raw_pdf(TEXT, resources=HELVETICA),
        "shown on a turned and cropped page": raw_pdf(
            TEXT, resources=HELVETICA, page="/Rotate 90 /CropBox [5 30 95 70]"
        ),
        "white on black": raw_pdf(f"0 g 0 0 100 100 re f 1 g {TEXT}", resources=HELVETICA),
        "beyond the page": raw_pdf(TEXT.replace("10 50", "10 500"), resources=HELVETICA),
        "beside the page": raw_pdf(TEXT.replace("10 50", "-500 50"), resources=HELVETICA),
        "invisible, as under a scan": raw_pdf(TEXT.replace("Td", "Td 3 Tr"), resources=HELVETICA),
        "white on white": raw_pdf(TEXT.replace("Td", "Td 1 g"), resources=HELVETICA),
        "nothing but spaces": raw_pdf("BT /F1 12 Tf 10 50 Td (   ) Tj ET", resources=HELVETICA),
        "drawn letters": glyphless("Total", "0 0 800 800 re f"),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_text_that_is_shown_or_meant_to_be_hidden_is_not_missed(
    tmp_path: Path, name: str, data: bytes, dpi: int
) -> None:
    assert not draw(tmp_path, data, dpi).lacks_text


@pytest.mark.parametrize("dpi", [30, 72, 300])
def test_letters_that_leave_no_ink_are_missed(tmp_path: Path, dpi: int) -> None:
    assert draw(tmp_path, glyphless("Total", ""), dpi).lacks_text
    beside = glyphless("Total", "", "0 0 20 20 re f")
    assert draw(tmp_path, beside, dpi).lacks_text, "ink elsewhere on the page is no text"


def test_chinese_in_a_font_that_is_not_embedded_is_drawn_or_told(tmp_path: Path) -> None:
    """Which of the two depends on the fonts of this machine."""
    descriptor = "/FontDescriptor << /Type /FontDescriptor /FontName /STSong-Light /Flags 4 /StemV 93 >>"
    system = "/CIDSystemInfo << /Registry (Adobe) /Ordering (GB1) /Supplement 4 >>"
    data = raw_pdf(
        "BT /F1 24 Tf 10 50 Td <53d17968> Tj ET",
        resources="/Font << /F1 5 0 R >>",
        more=(
            "<< /Type /Font /Subtype /Type0 /BaseFont /STSong-Light /Encoding /UniGB-UCS2-H "
            "/DescendantFonts [6 0 R] >>",
            f"<< /Type /Font /Subtype /CIDFontType0 /BaseFont /STSong-Light {system} {descriptor} >>",
        ),
    )
    page = draw(tmp_path, data)
    has_ink = bool((np.asarray(Image.open(io.BytesIO(page.png)).convert("L")) < 128).any())
    assert has_ink != page.lacks_text


async def outcome(renderer: PageRenderer, path: Path) -> tuple[str, str]:
    try:
        return "pages", str(await renderer.count(str(path)))
    except ImageError as error:
        return error.code, error.message


def test_what_is_said_of_a_file_does_not_depend_on_the_file_before_it(tmp_path: Path) -> None:
    """In one drawing process: pdfium keeps the last error, of whichever file it was."""
    for name, data in CASES.items():
        (tmp_path / name).write_bytes(data)

    async def run() -> None:
        alone = {}
        for name in CASES:
            renderer = PageRenderer()
            alone[name] = await outcome(renderer, tmp_path / name)
            await renderer.close()
        assert alone["good"] == ("pages", "1") and alone["password"][0] == "encrypted_pdf"
        assert alone["other encryption"][0] == "encrypted_pdf"
        assert alone["no pages"] == ("invalid_pdf", "The PDF has no pages.")
        renderer = PageRenderer()
        for pair in itertools.permutations(CASES, 2):
            for name in pair:
                assert await outcome(renderer, tmp_path / name) == alone[name], pair
        await renderer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "name", [b"caf\xe9.pdf", b"line\nbreak.pdf", b"~nobody.pdf", b"~.pdf", b"50% {x}.pdf"]
)
def test_a_pdf_is_read_whatever_its_name_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(os.fsdecode(name)).write_bytes(pdf([1, 2]))

    async def run() -> None:
        renderer = PageRenderer()
        assert await outcome(renderer, Path(os.fsdecode(name))) == ("pages", "2")
        await renderer.close()

    asyncio.run(run())


def test_what_nobody_foresaw_ends_one_file_and_not_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, limits: PageLimits) -> PdfPages:
        raise OverflowError

    monkeypatch.setattr(page_process, "PdfPages", fail)
    header, payload = page_process.answer("a.pdf", None, {}, PageLimits())
    assert (header["code"], payload) == ("page_crashed", b"")
