"""A page of any ratio in any of the plausible fonts, and what becomes of it before somebody looks at it."""

import math
from dataclasses import dataclass
from io import BytesIO
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from vlm.train.drawing.fonts import plausible_families, plausible_font
from vlm.train.drawing.layout import HALF_CAPITAL, Glyph
from vlm.train.drawing.tiles import RULE, TILE

SMALLEST = 11  # px of a font at the model's scale, where the longest edge is 256
Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Row:
    """A line of a page: a left part and a right part or "", and how it stands out."""

    left: str
    right: str = ""
    large: float = 1.0  # of the page's font size
    bold: bool = False
    space: float = 0.0  # of the line pitch, above it
    ruled: bool = False  # a rule above it

    def text(self) -> str:
        """What a reader writes down; the space between the parts counts as one."""
        return f"{self.left} {self.right}".strip()


@dataclass(frozen=True)
class Look:
    """How the rows of one page are set."""

    family: str
    bold: bool
    flush: bool  # right parts end at the right margin
    gap: str  # what lies between the parts where they are not flush
    leader: str  # repeated between flush parts
    centred: bool


def contrasting(rng: Random) -> tuple[Colour, Colour]:
    """Paper and ink: dark on light four times out of five."""
    paper = (255, 255, 255) if rng.random() < 0.5 else _shade(rng, 215, 255)
    ink = (0, 0, 0) if rng.random() < 0.4 else _shade(rng, 0, 90)
    if rng.random() < 0.1:  # a strong colour
        paper = rng.choice([(255, 212, 0), (250, 190, 60), (190, 230, 190), (180, 210, 250), (250, 190, 200)])
    if rng.random() < 0.2:
        paper, ink = _shade(rng, 0, 70), _shade(rng, 200, 255)
        if rng.random() < 0.3:
            paper = rng.choice([(10, 120, 50), (20, 50, 130), (170, 20, 20), (90, 30, 110)])
    elif rng.random() < 0.1:
        ink = rng.choice([(180, 0, 0), (0, 90, 30), (0, 40, 150), (110, 50, 0)])
    return paper, ink


def _shade(rng: Random, low: int, high: int) -> Colour:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def choose_look(rng: Random, held_out: bool, centred_share: float) -> Look:
    """A family that training draws, or one that it does not, and how rows are set."""
    return Look(
        rng.choice(plausible_families(held_out)),
        rng.random() < 0.3,
        rng.random() < 0.45,
        " " * rng.choice([1, 1, 2, 2, 3, 4, 6]),
        rng.choice(["", "", "", "."]),
        rng.random() < centred_share,
    )


def canvas_size(rng: Random) -> tuple[int, int]:
    """Width and height in px at the model's scale: the longest edge 256, the other from 100 on."""
    other = rng.choice([256, rng.randint(100, 256), rng.randint(160, 256)])
    return (other, 256) if rng.random() < 0.55 else (256, other)


class Sheet:
    """Rows drawn on a canvas at `scale` times the model's scale, with the place of every glyph."""

    def __init__(self, rng: Random, size: tuple[int, int], look: Look, scale: float) -> None:
        self.rng, self.look = rng, look
        self.width, self.height = round(size[0] * scale), round(size[1] * scale)
        self.scale = scale
        self.paper, self.ink = contrasting(rng)
        self.image = Image.new("RGB", (self.width, self.height), self.paper)
        self.pen = ImageDraw.Draw(self.image)
        self.marks: list[tuple[str, float, float, float]] = []  # character, x, y, font size, px of the image

    def _length(self, text: str, bold: bool, size: float) -> float:
        face = plausible_font(self.look.family, bold, max(round(size), 6))
        return float(face.getlength(text))

    def _room_of(self, row: Row, size: float) -> float:
        between = self.look.gap if row.right else ""
        return self._length(row.left + between + row.right, row.bold or self.look.bold, size * row.large)

    def write(self, text: str, x: float, y: float, bold: bool, size: float) -> None:
        """Writes `text` from x on, its capitals' middle at height y; px of the image."""
        face = plausible_font(self.look.family, bold, max(round(size), 6))
        left, baseline = round(x), round(y + HALF_CAPITAL * size)
        self.pen.text((left, baseline), text, font=face, fill=self.ink, anchor="ls")
        start = 0.0
        for index, char in enumerate(text):
            end = float(face.getlength(text[: index + 1]))
            if char != " ":
                self.marks.append((char, left + (start + end) / 2, baseline - HALF_CAPITAL * size, size))
            start = end

    def draw(self, rows: list[Row], largest: int) -> bool:
        """Draws the rows in a font of at most `largest` px at the model's scale; False if they don't fit."""
        margin = self.rng.uniform(4, 0.09 * self.width / self.scale + 4) * self.scale
        room = self.width - 2 * margin
        weight = sum(row.large + row.space for row in rows)
        size = largest * self.scale
        while size >= SMALLEST * self.scale and (
            max(self._room_of(row, size) for row in rows) > room
            or 1.2 * size * weight > self.height - 1.2 * margin
        ):
            size -= 0.5 * self.scale
        if size < SMALLEST * self.scale:
            return False
        tightest, loosest = 1.2 * size, (self.height - 1.2 * margin) / weight
        pitch = self.rng.uniform(tightest, min(loosest, 2.4 * size))
        spare = self.height - 1.2 * margin - pitch * weight
        y = 0.6 * margin + self.rng.choice([0.0, self.rng.random(), 0.5]) * spare
        for row in rows:
            y += pitch * row.space
            if row.ruled:
                self.pen.line(
                    (margin, y - 1, self.width - margin, y - 1), self.ink, max(round(self.scale), 1)
                )
            self._place(row, margin, y + pitch * row.large / 2, size * row.large)
            y += pitch * row.large
        return True

    def _place(self, row: Row, margin: float, y: float, size: float) -> None:
        bold = row.bold or self.look.bold
        if not row.right:
            centre = (self.width - self._length(row.left, bold, size)) / 2
            self.write(row.left, centre if self.look.centred else margin, y, bold, size)
            return
        self.write(row.left, margin, y, bold, size)
        near = margin + self._length(row.left + self.look.gap, bold, size)
        if not self.look.flush:
            self.write(row.right, near, y, bold, size)
            return
        far = self.width - margin - self._length(row.right, bold, size)
        dot = self._length(".", bold, size)
        if self.look.leader and far - near > 3 * dot:
            face = plausible_font(self.look.family, bold, round(size))
            baseline = round(y + HALF_CAPITAL * size)
            dots = "." * int((far - near) / dot - 1)
            self.pen.text((round(near), baseline), dots, font=face, fill=self.ink, anchor="ls")
        self.write(row.right, far, y, bold, size)

    def finish(self) -> tuple[Image.Image, list[Glyph]]:
        """The page turned, blurred, on rough paper, compressed, or none of it; glyphs in px of its tiles."""
        rng, image = self.rng, self.image
        if rng.random() < 0.15:
            inset = round(self.rng.uniform(1, 3) * self.scale)
            box = (inset, inset, self.width - inset - 1, self.height - inset - 1)
            self.pen.rectangle(box, outline=self.ink, width=max(round(self.scale), 1))
        angle = rng.uniform(-2, 2) if rng.random() < 0.25 else 0.0
        if angle:
            image = image.rotate(angle, Image.Resampling.BICUBIC, fillcolor=self.paper)
        if rng.random() < 0.25:
            image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.7) * self.scale))
        if rng.random() < 0.2:
            grain = np.random.default_rng(rng.randrange(2**32))
            rough = grain.normal(0.0, rng.uniform(1, 7), (self.height, self.width, 1))
            image = Image.fromarray(np.clip(np.asarray(image) + rough, 0, 255).astype(np.uint8))
        if rng.random() < 0.3:
            buffer = BytesIO()
            image.save(buffer, "JPEG", quality=rng.randint(40, 95))
            image = Image.open(buffer).convert("RGB")
        return image, self._glyphs(math.radians(angle))

    def _glyphs(self, turned: float) -> list[Glyph]:
        grid = RULE.plan(self.width, self.height).grid
        across, down = grid.cols * TILE / self.width, grid.rows * TILE / self.height
        middle_x, middle_y = self.width / 2, self.height / 2
        cos, sin = math.cos(turned), math.sin(turned)
        found = []
        for char, x, y, size in self.marks:
            dx, dy = x - middle_x, y - middle_y
            turned_x, turned_y = middle_x + dx * cos + dy * sin, middle_y - dx * sin + dy * cos
            found.append(Glyph(char, turned_x * across, turned_y * down, size * down))
        return found
