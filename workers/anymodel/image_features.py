"""Encoder outputs by an image's content, put in the place of a model's own `get_image_features`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from llm.request import VisualKey
from workers.anymodel.recent import Recent, tensor_bytes

Inputs = dict[str, Any]


class ImageFeatures:
    """Remembers what a model's encoder made of each image.

    A request of several images is put together from those of one each, where the model's outputs can be
    joined; else it is encoded as a whole, and remembered as a whole.
    """

    def __init__(self, model: Any, alone: Callable[[Any], Inputs], max_bytes: int) -> None:
        """`alone`: an image by itself as the encoder takes it."""
        self.kept = Recent(max_bytes)
        self.num_calls = 0
        self._alone = alone
        self._images: dict[VisualKey, Any] = {}
        self._order: tuple[VisualKey, ...] = ()
        owner = getattr(model, "base_model", model)
        self._encode: Callable[..., Any] | None = getattr(owner, "get_image_features", None)
        if self._encode is not None:

            @functools.wraps(self._encode)  # `generate` reads which inputs it takes
            def features(*args: Any, **inputs: Any) -> Any:
                return self._features(*args, **inputs)

            owner.get_image_features = features

    def expect(self, keys: Sequence[VisualKey], images: Sequence[Any]) -> None:
        """Whose features the next forwards ask for, in the prompt's order; what none ask for is not kept."""
        self._order, self._images = tuple(keys), dict(zip(keys, images, strict=True))

    def _features(self, *args: Any, **inputs: Any) -> Any:
        assert self._encode is not None
        if not self._order or args:
            return self._encode(*args, **inputs)
        whole = self.kept.get(self._order)
        if whole is None and len(self._order) > 1:
            whole = self._joined(inputs)
        return self._run(self._order, inputs) if whole is None else whole

    def _joined(self, inputs: Inputs) -> Any | None:
        """None where the outputs of single images can't be put together."""
        others = {name: value for name, value in inputs.items() if not isinstance(value, torch.Tensor)}
        outputs = []
        for key in self._order:
            output = self.kept.get((key,))
            if output is None:
                given = self._alone(self._images[key])
                if not inputs.keys() - others.keys() <= given.keys():
                    return None
                wanted = {name: given[name] for name in inputs.keys() - others.keys()}
                output = self._run((key,), {**wanted, **others})
            outputs.append(output)
        rows: list[Any] = [getattr(output, "pooler_output", None) for output in outputs]
        joined = type(outputs[0])()
        if all(isinstance(row, list | tuple) for row in rows):
            joined["pooler_output"] = tuple(part for row in rows for part in row)
        elif all(isinstance(row, torch.Tensor) and row.shape[1:] == rows[0].shape[1:] for row in rows):
            joined["pooler_output"] = torch.cat(rows)
        else:
            return None
        return joined

    def _run(self, keys: tuple[VisualKey, ...], inputs: Inputs) -> Any:
        assert self._encode is not None
        self.num_calls += 1
        output = self._encode(**inputs)
        rows = getattr(output, "pooler_output", None)
        if rows is not None:
            kept = type(output)()
            kept["pooler_output"] = rows
            self.kept.put(keys, kept, tensor_bytes(rows))
        return output
