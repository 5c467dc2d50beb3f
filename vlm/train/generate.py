"""Greedy answers straight from the training network: for checks of a checkpoint without the serving path."""

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from vlm.train.decoder import segment_mask
from vlm.train.drawing.tiles import cut
from vlm.train.network import Network
from vlm.train.prompts import PromptBuilder


@torch.no_grad()
def answer_all(
    network: Network,
    builder: PromptBuilder,
    image: Image.Image,
    questions: list[str],
    max_new_tokens: int = 96,
) -> list[str]:
    """Answers to all questions about one image at once: every step recomputes the packed sequence."""
    pieces = cut(image.convert("RGB"))
    visual = network.model.connector(network.model.vision_model(torch.from_numpy(pieces.pixels))).flatten(
        0, 1
    )
    prefix = builder.prefix(pieces.grid)
    asked = [builder.segment(question, "")[0] for question in questions]
    answers: list[list[int]] = [[] for _ in questions]
    end = builder.end
    running = list(range(len(questions)))
    while running and len(answers[running[0]]) < max_new_tokens:
        tokens, positions, segments, last = list(prefix), list(range(len(prefix))), [0] * len(prefix), []
        for index in running:
            part = asked[index] + answers[index]
            tokens += part
            positions += range(len(prefix), len(prefix) + len(part))
            segments += [index + 1] * len(part)
            last.append(len(tokens) - 1)
        mask = segment_mask(torch.tensor(segments))
        layout = network.layout(torch.tensor(positions), [len(tokens)], [mask])
        chosen = network.decode(torch.tensor(tokens), visual, layout, torch.tensor(last)).argmax(-1).tolist()
        for index, token in zip(list(running), chosen, strict=True):
            if token == end:
                running.remove(index)
            else:
                answers[index].append(token)
    return [builder.decode(answer).strip() for answer in answers]


def answerer(folder: Path) -> Callable[[Image.Image, str], str]:
    """`answer(image, question)` from an exported directory."""
    network, builder = Network.load(folder).eval(), PromptBuilder(folder)

    def answer(image: Image.Image, question: str) -> str:
        return answer_all(network, builder, image, [question])[0]

    return answer
