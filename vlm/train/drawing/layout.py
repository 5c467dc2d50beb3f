"""Places lines of text on a page and remembers where every glyph's centre is.

A glyph's centre, everywhere in training: half-way through its advance, and half a capital's height above the
baseline. Lines sit 32 px apart, so that each falls into one row of visual tokens, and none across two tiles.
"""

from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

from vlm.train.drawing.fonts import FAMILIES, font

LINE_PITCH = 32
HALF_CAPITAL = 0.365  # of the font size: DejaVu's capitals are 0.729 high


@dataclass(frozen=True)
class Glyph:
    """One visible character, its centre (px at the model's scale) and its font size (same px)."""

    char: str
    x: float
    y: float
    size: float


@dataclass(frozen=True)
class Page:
    """Page size in px at the model's scale."""

    width: int
    height: int


def colours(rng: Random) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """A light paper and a dark ink."""
    if rng.random() < 0.5:
        paper = (255, 255, 255)
    else:
        paper = (rng.randint(225, 255), rng.randint(225, 255), rng.randint(225, 255))
    top = rng.choice([0, 20, 60])
    ink = (rng.randint(0, top), rng.randint(0, top), rng.randint(0, top))
    return paper, ink


class Canvas:
    """An image drawn at `scale` times the model's scale, and the glyphs on it."""

    def __init__(self, page: Page, scale: int, paper: tuple[int, int, int]) -> None:
        self.page, self.scale = page, scale
        self.image = Image.new("RGB", (page.width * scale, page.height * scale), paper)
        self.pen = ImageDraw.Draw(self.image)
        self.glyphs: list[Glyph] = []

    def width_of(self, text: str, family: str, size: int) -> float:
        """Width of `text` at the model's scale."""
        return float(font(family, size * self.scale).getlength(text)) / self.scale

    def write(self, text: str, x: float, y: float, family: str, size: int, ink: tuple[int, int, int]) -> None:
        """Writes `text` from x on, its capitals' middle at height y (model scale)."""
        face = font(family, size * self.scale)
        left, baseline = round(x * self.scale), round((y + HALF_CAPITAL * size) * self.scale)
        self.pen.text((left, baseline), text, font=face, fill=ink, anchor="ls")
        middle = baseline / self.scale - HALF_CAPITAL * size
        start = 0.0
        for index, char in enumerate(text):
            end = float(face.getlength(text[: index + 1]))
            if char != " ":
                self.glyphs.append(Glyph(char, (left + (start + end) / 2) / self.scale, middle, size))
            start = end


def draw_lines(
    rng: Random, page: Page, lines: list[tuple[str, str]], level: float
) -> tuple[Image.Image, list[Glyph]]:
    """Lines of 16 to 20 px text, one font a page; the second part of a line is right-aligned."""
    paper, ink = colours(rng)
    canvas = Canvas(page, rng.choice([1, 1, 2]), paper)
    family = rng.choice(list(FAMILIES))
    size = rng.randint(16, 20)
    room = page.width - 6
    while size > 14 and max(canvas.width_of(f"{a} {b}".strip(), family, size) for a, b in lines) > room:
        size -= 1
    widest = max(canvas.width_of(f"{a} {b}".strip(), family, size) for a, b in lines)
    margin = rng.randint(3, max(3, min(int((page.width - widest) / 2), 14)))
    flush = rng.random() < 0.7 or page.width == 128
    centred = rng.random() < 0.2
    slots = page.height // LINE_PITCH
    spare = (slots - len(lines)) * 2
    first = 8 + 16 * rng.randint(1 if spare else 0, max(spare - 1, 1 if spare else 0))
    slack = 1 + 2 * level
    for index, (left, right) in enumerate(lines):
        y = max(first + LINE_PITCH * index + rng.uniform(-slack, slack), 8.0)
        if right:
            canvas.write(left, margin, y, family, size, ink)
            gap = canvas.width_of(f"{left} ", family, size)
            right_x = page.width - margin - canvas.width_of(right, family, size)
            canvas.write(right, max(right_x, margin + gap) if flush else margin + gap, y, family, size, ink)
        else:
            x = (page.width - canvas.width_of(left, family, size)) / 2 if centred else margin
            canvas.write(left, x, y, family, size, ink)
    return canvas.image, canvas.glyphs


def draw_sign(rng: Random, texts: list[str]) -> tuple[Image.Image, list[Glyph]]:
    """Up to three large lines, each placed freely, on a square page."""
    paper, ink = colours(rng)
    page = Page(256, 256)
    canvas = Canvas(page, 1 if rng.random() < 0.7 else 2, paper)
    family = rng.choice(list(FAMILIES))
    height = 2 * rng.randint(18, 34)
    while height > 32 and (
        max(canvas.width_of(text, family, height) for text in texts) > 240 or 1.15 * height * len(texts) > 236
    ):
        height -= 2
    spare = 250 - 1.15 * height * len(texts)
    y = 3 + rng.uniform(0, max(spare, 0) * (1 if len(texts) == 1 else 0.5)) + 0.575 * height
    for text in texts:
        room = 252 - canvas.width_of(text, family, height)
        canvas.write(text, rng.uniform(4, max(4.0, room)), y, family, height, ink)
        y += 1.15 * height + rng.uniform(0, max(spare, 0) * 0.5 / len(texts))
    if canvas.scale == 1 and rng.random() < 0.5:
        return canvas.image.resize((128, 128), Image.Resampling.LANCZOS), canvas.glyphs
    return canvas.image, canvas.glyphs
