"""Pictures of coloured shapes and the questions about them."""

import math
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw

SHAPES = ("square", "circle", "triangle", "star")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 60, 210),
    "yellow": (245, 220, 40),
    "orange": (250, 140, 20),
    "purple": (130, 50, 170),
    "black": (20, 20, 20),
    "pink": (255, 150, 200),
}
CELLS = ((64, 64), (192, 64), (64, 192), (192, 192))  # centres on a 256 px page


@dataclass(frozen=True)
class Shape:
    """A shape of SHAPES in a colour of COLOURS."""

    name: str
    colour: str


@dataclass(frozen=True)
class Spot:
    """Where a shape lies: centre and radius in px at the model's scale (page side 256)."""

    shape: Shape
    x: float
    y: float
    radius: float


def choose(rng: Random, count: int) -> list[Shape]:
    """`count` shapes; three of four times no two share a colour or a form."""
    if rng.random() < 0.75:
        return [
            Shape(*pair)
            for pair in zip(rng.sample(SHAPES, count), rng.sample(list(COLOURS), count), strict=True)
        ]
    return [Shape(rng.choice(SHAPES), rng.choice(list(COLOURS))) for _ in range(count)]


def _outline(name: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    if name == "square":
        return [
            (x - radius, y - radius),
            (x + radius, y - radius),
            (x + radius, y + radius),
            (x - radius, y + radius),
        ]
    corners, inner = (3, None) if name == "triangle" else (5, 0.42)
    points = []
    for index in range(corners * (1 if inner is None else 2)):
        reach = radius if inner is None or index % 2 == 0 else radius * inner
        angle = -math.pi / 2 + index * 2 * math.pi / (corners * (1 if inner is None else 2))
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def draw(rng: Random, shapes: list[Shape]) -> tuple[Image.Image, list[Spot]]:
    """Shapes in cells of a 2x2 grid, in reading order, on white or light paper; 128 or 256 px square."""
    paper = (255, 255, 255) if rng.random() < 0.6 else tuple(rng.randint(225, 255) for _ in range(3))
    image = Image.new("RGB", (256, 256), paper)
    pen = ImageDraw.Draw(image)
    spots = []
    for shape, cell in zip(shapes, sorted(rng.sample(range(4), len(shapes))), strict=True):
        x, y = (centre + rng.uniform(-14, 14) for centre in CELLS[cell])
        radius = rng.uniform(26, 48)
        spots.append(Spot(shape, x, y, radius))
        fill = tuple(max(0, min(255, part + rng.randint(-12, 12))) for part in COLOURS[shape.colour])
        if shape.name == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
            pen.polygon(_outline(shape.name, x, y, radius), fill=fill)
    return (image.resize((128, 128), Image.Resampling.LANCZOS) if rng.random() < 0.3 else image), spots


def caption(shapes: list[Shape]) -> str:
    """The shapes in reading order, as a sentence."""
    names = [f"{'an' if shape.colour == 'orange' else 'a'} {shape.colour} {shape.name}" for shape in shapes]
    joined = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{joined[0].upper()}{joined[1:]}."


def questions(rng: Random, shapes: list[Shape]) -> list[tuple[str, str, str]]:
    """(kind, question, answer): caption, count, and colour or shape wherever the answer is unique."""
    forms = [shape.name for shape in shapes]
    hues = [shape.colour for shape in shapes]
    found = [
        ("caption", rng.choice(("Describe the image.", "What is in the image?")), caption(shapes)),
        ("count", "How many shapes are there?", str(len(shapes))),
    ]
    for shape in shapes:
        if forms.count(shape.name) == 1:
            word = "color" if rng.random() < 0.8 else "colour"
            found.append(("colour", f"What {word} is the {shape.name}?", shape.colour))
        if hues.count(shape.colour) == 1:
            found.append(("shape", f"Which shape is {shape.colour}?", shape.name))
    return found
