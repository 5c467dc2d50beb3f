"""Token sequences: one image's prompt with several questions, each seeing the image and itself."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

TOKENS_PER_TILE = 16


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
    """SmolVLM's chat template and image markers in token ids."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.image_token = self.tokenizer.token_to_id("<image>")
        self._prefixes: dict[tuple[int, int, str], list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens included where it names them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prefix(self, rows: int, cols: int, instruction: str = "") -> list[int]:
        """Everything before the question for a grid of tiles with its thumbnail; `instruction` leads it."""
        if (rows, cols, instruction) not in self._prefixes:
            images = "<image>" * TOKENS_PER_TILE
            text = f"<|im_start|>User: {instruction}" if instruction else "<|im_start|>User:"
            for row in range(rows):
                for col in range(cols):
                    text += f"<fake_token_around_image><row_{row + 1}_col_{col + 1}>{images}"
                text += "\n"
            text += f"\n<fake_token_around_image><global-img>{images}<fake_token_around_image>"
            self._prefixes[rows, cols, instruction] = self.encode(text)
        return self._prefixes[rows, cols, instruction]

    def segment(self, question: str, answer: str) -> tuple[list[int], list[int]]:
        """(tokens of the question up to "Assistant:", tokens of the answer with its end).

        A JSON answer follows without a space, as a schema demands it.
        """
        asked = self.encode(f"{question}<end_of_utterance>\nAssistant:")
        space = "" if answer.startswith("{") else " "
        return asked, self.encode(f"{space}{answer}<end_of_utterance>")

    def sequence(
        self, rows: int, cols: int, pairs: list[tuple[str, str]], instruction_first: bool = False
    ) -> Sequence:
        """The packed sequence of one image and its (question, answer) pairs.

        `instruction_first`: the only question is written before the image.
        """
        instruction = ""
        if instruction_first:
            ((instruction, answer),) = pairs
            pairs = [("", answer)]
        prefix = self.prefix(rows, cols, instruction)
        tokens, positions = list(prefix), list(range(len(prefix)))
        segments, targets = [0] * len(prefix), [-100] * len(prefix)
        for number, (question, answer) in enumerate(pairs, 1):
            asked, answered = self.segment(question, answer)
            together = asked + answered
            tokens += together
            positions += range(len(prefix), len(prefix) + len(together))
            segments += [number] * len(together)
            targets += [-100] * (len(asked) - 1) + answered + [-100]
        return Sequence(
            *(np.asarray(values, dtype=np.int64) for values in (tokens, positions, segments, targets))
        )
