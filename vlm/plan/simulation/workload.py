"""Requests to simulate: the articles' eight, a file's, or Poisson arrivals with length distributions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm.cost import CostError


@dataclass(frozen=True, slots=True)
class Arrival:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.arrival_s < 0 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise CostError("a request arrives at 0 s or later with at least one token in and one out")


# Eight requests at once, prompts 128 to 8,192 and outputs 20 to 500 that sum to 1,180: the range and the
# sum that "The Mechanics of LLM Inference" gives; the values between are ours.
ARTICLE_REQUESTS: tuple[Arrival, ...] = tuple(
    Arrival(0.0, prompt, output)
    for prompt, output in zip(
        (512, 8192, 128, 1024, 2048, 256, 4096, 768), (20, 40, 500, 60, 80, 150, 100, 230), strict=True
    )
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """`fixed:N`, `uniform:LOW:HIGH` or `lognormal:MEDIAN:SIGMA`, in tokens."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises CostError for another form."""
        kind, *numbers = text.split(":")
        wanted = {"fixed": 1, "uniform": 2, "lognormal": 2}.get(kind)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            wanted = None
            values = []
        if wanted != len(values) or not values or min(values) < 0 or values[0] < 1:
            raise CostError("lengths are fixed:N, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, N at least 1")
        if kind == "uniform" and values[1] < values[0]:
            raise CostError("uniform:LOW:HIGH needs HIGH at or above LOW")
        return cls(kind, *values)

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """int [num], at least 1."""
        if self.kind == "fixed":
            drawn = np.full(num, self.first)
        elif self.kind == "uniform":
            drawn = rng.integers(int(self.first), int(self.second) + 1, num).astype(float)
        else:
            drawn = rng.lognormal(np.log(self.first), self.second, num)
        return np.maximum(1, np.rint(drawn)).astype(int)


def poisson_arrivals(
    rate_per_s: float, num: int, prompt: Lengths, output: Lengths, seed: int = 0
) -> tuple[Arrival, ...]:
    """`num` requests whose gaps are exponential with mean 1 / rate; the same seed gives the same list."""
    if rate_per_s <= 0 or num < 1:
        raise CostError("arrivals need a rate above 0 and at least one request")
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1.0 / rate_per_s, num))
    prompts, outputs = prompt.draw(rng, num), output.draw(rng, num)
    return tuple(Arrival(float(t), int(p), int(o)) for t, p, o in zip(times, prompts, outputs, strict=True))


def read_arrivals(path: Path) -> tuple[Arrival, ...]:
    """JSON lines with arrival_s, prompt_tokens and output_tokens. Raises CostError."""
    arrivals = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CostError(f"can't read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            arrivals.append(
                Arrival(float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
            )
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, CostError):
                raise CostError(f"line {number}: {error}") from None
            raise CostError(
                f"line {number} is not an object with arrival_s, prompt_tokens and output_tokens"
            ) from None
    if not arrivals:
        raise CostError("the file holds no requests")
    return tuple(sorted(arrivals, key=lambda arrival: arrival.arrival_s))
