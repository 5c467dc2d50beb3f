"""The peers, used as their documentation says, on the same checkpoint and threads."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image


class TransformersVlm:
    """`transformers` with its own processor, KV cache and padded batches, greedy, float32."""

    def __init__(self, directory: Path, *, threads: int) -> None:
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        torch.set_num_threads(threads)
        self._torch = torch
        self.processor = AutoProcessor.from_pretrained(directory)
        self.processor.tokenizer.padding_side = "left"
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()

    def prepare(self, images: Sequence[bytes], questions: Sequence[str]) -> Any:
        """One image and one question a row, padded to the longest."""
        texts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
                add_generation_prompt=True,
            )
            for question in questions
        ]
        pictures = [[Image.open(io.BytesIO(data)).convert("RGB")] for data in images]
        return self.processor(text=texts, images=pictures, return_tensors="pt", padding=True)

    def generate_batch(
        self, images: Sequence[bytes], questions: Sequence[str], lengths: Sequence[int]
    ) -> Any:
        """Token ids [batch, prompt + max(lengths)]: a padded batch runs as long as its longest row."""
        inputs = self.prepare(images, questions)
        longest = max(lengths)
        with self._torch.inference_mode():
            return self.model.generate(
                **inputs, max_new_tokens=longest, min_new_tokens=longest, do_sample=False
            )
