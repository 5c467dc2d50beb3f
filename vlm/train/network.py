"""A SmolVLM network for training: tower, connector and decoder without transformers' overhead."""

from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from vlm.train.decoder import Layout, TextLayer, TextModel
from vlm.train.drawing.geometry import Shape
from vlm.train.drawing.tiles import NUM_CLASSES, SLOTS
from vlm.train.vision import Connector, VisionModel


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.vision_model = VisionModel(shape)
        self.connector = Connector(shape)
        self.text_model = TextModel(shape)


class Network(nn.Module):
    """Tower, connector and decoder under `model.`; training's character heads, not exported."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Model(shape)
        self.patch_head = nn.Linear(shape.vision_width, SLOTS * NUM_CLASSES)
        self.token_head = nn.Linear(shape.width, shape.fold**2 * SLOTS * NUM_CLASSES)
        self.frequencies: Tensor
        powers = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        self.register_buffer("frequencies", 1.0 / shape.rope_theta**powers, persistent=False)

    @classmethod
    def load(cls, folder: Path) -> "Network":
        """Weights of a Hugging Face directory as float32; fresh character heads unless it has them beside."""
        network = cls(Shape.read(folder))
        weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
        weights.pop("lm_head.weight", None)
        missing, unexpected = network.load_state_dict(weights, strict=False)
        if unexpected or any(name.startswith("model.") for name in missing):
            raise ValueError("not a checkpoint of this family")
        return network

    def exported(self) -> dict[str, Tensor]:
        """The weights a checkpoint holds."""
        return {name: value for name, value in self.state_dict().items() if name.startswith("model.")}

    def layout(self, positions: Tensor, lengths: list[int], masks: list[Tensor]) -> Layout:
        """Rotary tables for flat `positions` (N,)."""
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return Layout(angles.cos(), angles.sin(), lengths, masks)

    def decode(self, tokens: Tensor, visual: Tensor, layout: Layout, wanted: Tensor) -> Tensor:
        """Logits (W, vocab) at flat positions `wanted`; `visual` (V, width) fills the image tokens."""
        text = self.model.text_model
        x = text.embed_tokens(tokens)
        places = (tokens == self.shape.image_token).nonzero()[:, 0]
        x = x.index_put((places,), visual.to(x.dtype))
        for layer in text.layers[:-1]:
            x = layer(x, layout)
        last = cast(TextLayer, text.layers[-1])
        x = (x + last.attend(x, layout))[wanted]  # only these matter from here on
        return F.linear(text.norm(x + last.feed(x)), text.embed_tokens.weight)
