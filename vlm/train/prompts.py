"""Token sequences: the prompt of images with several questions, each seeing the image and itself.

The product's own prompt builder writes them; they are cut here where questions part from the image.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from llm.request import VisualKey
from preprocess.types import TileGrid
from vlm.prompt import ImagePart, Message
from vlm.spec import ModelSpec
from vlm.train.drawing.tiles import TILE

_KEY = VisualKey("")  # of an image that no cache knows
_CLOSING = 1  # marker behind an image's visual tokens
_ANY_GRID = TileGrid(1, 2, True, TILE, TILE)  # what follows an image is the same for all


@dataclass(frozen=True)
class Sequence:
    """Shapes [n]. `targets[i]` is the token that should follow token i, or -100 where no loss is taken.

    `segments` is 0 for the image's prompt, k for question k; `positions` restart after the prompt for each.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    targets: np.ndarray


class PromptBuilder:
    """Chats about images in token ids, as the service writes them."""

    def __init__(self, folder: Path) -> None:
        spec = ModelSpec.load(folder, files="text")
        self._tokenizer, self._builder = spec.tokenizer, spec.prompt_builder
        (self.end,) = self._tokenizer.encode("<end_of_utterance>", starts=False)
        self._parts = lru_cache(maxsize=4096)(self._cut)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _cut(self, grids: tuple[TileGrid, ...], before: str, after: str) -> tuple[list[int], list[int]]:
        """(all up to the last image's end, all behind it) of a chat with text before and after its images."""
        images = [ImagePart(grid, _KEY) for grid in grids]
        content: list[str | ImagePart] = [before, *images, after]
        prompt = self._builder.build([Message("user", tuple(part for part in content if part))])
        end = prompt.spans[-1].start + prompt.spans[-1].length + _CLOSING
        return list(prompt.token_ids[:end]), list(prompt.token_ids[end:])

    def prefix(self, *grids: TileGrid, instruction: str = "") -> list[int]:
        """Everything before the question about the images; `instruction` leads it."""
        return self._parts(grids, instruction, "")[0]

    def segment(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """(tokens of the question up to "Assistant:", tokens of the answer with its end).

        A JSON answer follows without a space, as a schema demands it.
        """
        space = "" if answer.startswith("{") else " "
        asked = self._parts((_ANY_GRID,), "", question)[1]
        return asked, self._tokenizer.encode(f"{space}{answer}<end_of_utterance>", starts=False)

    def follow_up(self, question: str) -> list[int]:
        """The tokens of a further question behind an answer, up to "Assistant:"."""
        text = f"\nUser: {question}<end_of_utterance>\nAssistant:"
        return self._tokenizer.encode(text, starts=False)

    def sequence(
        self, grids: list[TileGrid], pairs: list[tuple[str, str]], first: bool = False, turns: bool = False
    ) -> Sequence:
        """The packed sequence of one image or several and its (question, answer) pairs.

        `first`: the only question is written before the image. `turns`: each question follows the answer to
        the one before and sees it; all are segment 1.
        """
        instruction = ""
        if first:
            ((instruction, answer),) = pairs
            pairs = [("", answer)]
        prefix = self.prefix(*grids, instruction=instruction)
        tokens, positions = list(prefix), list(range(len(prefix)))
        segments, targets = [0] * len(prefix), [-100] * len(prefix)
        for number, (question, answer) in enumerate(pairs, 1):
            asked, answered = self.segment(question, answer)
            if turns and number > 1:
                asked = self.follow_up(question)
            together = asked + answered
            start = len(tokens) if turns else len(prefix)
            tokens += together
            positions += range(start, start + len(together))
            segments += [1 if turns else number] * len(together)
            targets += [-100] * (len(asked) - 1) + answered + [-100]
        return Sequence(
            *(np.asarray(values, dtype=np.int64) for values in (tokens, positions, segments, targets))
        )
