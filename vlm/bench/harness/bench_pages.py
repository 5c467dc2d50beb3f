"""Folders of generated documents: mixed sizes and formats, PDFs, equal pages and broken files."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from random import Random

from PIL import Image

from vlm.train.drawing.documents import HELD_OUT_SEED, make_document

KINDS = ("receipt", "invoice", "label", "sign", "shapes")
PDF_PAGES = 20
_PERIOD = 40  # pages: a folder of more has the same sizes in every format, so the same largest ones
_FORMATS = (("png", "PNG"), ("jpg", "JPEG"), ("webp", "WEBP"), ("tif", "TIFF"))


@dataclass(frozen=True, slots=True)
class Folder:
    """What was generated. `num_pages` counts all; each broken file counts as one page."""

    path: Path
    num_pages: int
    num_broken: int
    num_copies: int  # single files that are byte for byte equal to another one


def draw_page(number: int, seed: int = 0, max_scale: float = 6.0) -> Image.Image:
    """Page `number`: a held-out document at one to `max_scale` times the model's scale."""
    image, _ = make_document(KINDS[number % len(KINDS)], HELD_OUT_SEED + seed * 1_000_000 + number)
    scale = 1.0 + (max_scale - 1.0) * (7 * number % _PERIOD) / (_PERIOD - 1)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def encode(image: Image.Image, form: str) -> bytes:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, form, **({"quality": 90} if form in ("JPEG", "WEBP") else {}))
    return buffer.getvalue()


def make_folder(
    path: Path,
    num_pages: int,
    *,
    copies: float = 0.1,
    broken: float = 0.02,
    pdfs: int = 2,
    max_scale: float = 6.0,
    seed: int = 0,
) -> Folder:
    """Fills a folder with files of `num_pages` pages in all; the same arguments give the same bytes."""
    path.mkdir(parents=True, exist_ok=True)
    rng = Random(f"folder/{seed}")
    num_copies, num_broken = round(copies * num_pages), round(broken * num_pages)
    num_single = num_pages - pdfs * PDF_PAGES - num_copies - num_broken
    if num_single < 1:
        raise ValueError("too few pages for that many PDFs")
    singles: list[bytes] = []
    for number in range(num_single):
        suffix, form = _FORMATS[number % len(_FORMATS)]
        singles.append(encode(draw_page(number, seed, max_scale), form))
        (path / f"scan {number}.{suffix}").write_bytes(singles[-1])
    for number in range(num_copies):
        (path / f"copy {number}.png").write_bytes(rng.choice(singles))
    for number in range(num_broken):
        data = rng.choice(singles)
        (path / f"broken {number}.png").write_bytes(data[: len(data) // 2] if number % 2 else b"no image")
    for number in range(pdfs):
        numbers = range(10_000 + number * PDF_PAGES, 10_000 + (number + 1) * PDF_PAGES)
        first, *rest = [draw_page(page, seed, max_scale) for page in numbers]
        first.save(path / f"report {number}.pdf", "PDF", save_all=True, append_images=rest, resolution=150.0)
    return Folder(path, num_pages, num_broken, num_copies)
