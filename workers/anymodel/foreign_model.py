"""A checkpoint as transformers runs it: its classes, the checkpoint's processor, no code from its folder."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    LogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from encoder.tensor_files import CheckpointError, read_index
from llm.decoder_config import ConfigError
from llm.request import RequestError, VisualKey
from workers.anymodel.answer_thread import AnswerThread
from workers.anymodel.image_features import ImageFeatures
from workers.anymodel.recent import Recent, tensor_bytes

log = logging.getLogger(__name__)

_ENDLESS = 1 << 30  # tokens; whoever draws them says when to stop
_CACHE = next(f.name for f in fields(GenerateDecoderOnlyOutput) if f.name in ("cache", "past_key_values"))
_KEPT_SETTINGS = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
# Images by their names in the inputs of models: what a prompt whose images are in its cache goes without
_TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "cross_attention_mask")
_AGREES = 1e-3  # of the logits' spread: a prompt in two parts is the prompt in one
BAD_PROMPT = "The model's processor can't take these messages and images together."


@dataclass(frozen=True)
class ForeignPrompt:
    """What the processor made of a prompt. inputs: tensors, the first dimension one."""

    inputs: dict[str, Any]
    keys: tuple[VisualKey, ...]
    images: tuple[Image.Image, ...]
    num_image_tokens: int
    images_end: int  # position after the last image and its markers; 0 without images

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self.inputs["input_ids"][0].tolist())


class ForeignModel:
    """Not thread-safe: one forward at a time, in whichever thread."""

    def __init__(
        self,
        directory: Path | str,
        *,
        device: str,
        dtype: torch.dtype,
        feature_bytes: int,
        prefix_bytes: int,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """`tick` is called in each layer. Raises ConfigError where transformers can't load the checkpoint."""
        try:
            self._processor = AutoProcessor.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            _check_size(Path(directory))
            self._model, loaded = AutoModelForImageTextToText.from_pretrained(
                directory,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            if lost := sorted(map(str, (*loaded["missing_keys"], *loaded["mismatched_keys"]))):
                raise CheckpointError(f"its files lack {len(lost)} tensors, among them {lost[0]:.80}")
        except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
            reason = str(error).strip().partition("\n")[0][:300]
            raise ConfigError(f"transformers can't load the checkpoint: {reason}") from error
        self._model.eval().requires_grad_(False).to(device)
        self._device, self._tick = device, tick
        for layers in self._model.modules():
            for layer in layers if isinstance(layers, torch.nn.ModuleList) else ():
                layer.register_forward_pre_hook(self._in_layer)
        old = self._model.generation_config
        kept = {name: getattr(old, name, None) for name in _KEPT_SETTINGS}
        kept["pad_token_id"] = kept["pad_token_id"] or 0
        self._model.generation_config = GenerationConfig(**kept, do_sample=False, use_cache=True)
        # M-RoPE's offset behind the images, which such models keep in themselves between two forwards
        self._stateful = [part for part in self._model.modules() if hasattr(part, "rope_deltas")]
        self.features = ImageFeatures(self._model, self._image_inputs, feature_bytes)
        self.prefixes = Recent(prefix_bytes)
        self._is_causal: bool | None = None  # whether a prompt may be computed in two parts; None: not tried
        self.num_prefilled = 0  # tokens

    @property
    def name(self) -> str:
        return type(self._model).__name__

    @property
    def vocab_size(self) -> int:
        """Columns of its logits."""
        head = self._model.get_output_embeddings()
        return int(self._model.config.get_text_config().vocab_size if head is None else head.weight.shape[0])

    def _in_layer(self, *_: Any) -> None:
        self._tick()

    def prompt(self, text: str, keys: Sequence[VisualKey], pixels: Sequence[np.ndarray]) -> ForeignPrompt:
        """`pixels`: uint8 [height, width, 3]. Raises RequestError for what the processor refuses."""
        images = tuple(Image.fromarray(image) for image in pixels)
        tokenizer = self._processor.tokenizer
        begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        try:
            inputs = self._processor(
                text=[text],
                images=[list(images)] if images else None,
                return_tensors="pt",
                add_special_tokens=not begun,
            )
        except (ValueError, TypeError, IndexError, KeyError) as error:
            log.warning("the processor refused a prompt", exc_info=error)
            raise RequestError("invalid_request", BAD_PROMPT, "messages") from error
        tensors = {name: value for name, value in inputs.items() if name != "labels"}
        tensors = {name: self._placed(value) for name, value in tensors.items()}
        marks = tensors["input_ids"][0] == self._image_token_id
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in tensors:
                marks = marks | (tensors[name][0] != 0)
        places = marks.nonzero()
        return ForeignPrompt(
            tensors,
            tuple(keys),
            images,
            int((tensors["input_ids"][0] == self._image_token_id).sum()),
            int(places[-1]) + 1 if images and len(places) else 0,
        )

    @property
    def _image_token_id(self) -> int:
        config = self._model.config
        for name in ("image_token_id", "image_token_index"):
            if isinstance(found := getattr(config, name, None), int):
                return found
        return -1

    def _placed(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self._device, self._model.dtype if value.is_floating_point() else None)

    def _image_inputs(self, image: Any) -> dict[str, Any]:
        given = self._processor.image_processor(images=[image], return_tensors="pt")
        return {name: self._placed(value) for name, value in given.items()}

    @torch.no_grad()
    def answer(self, prompt: ForeignPrompt, namespace: str, thread: AnswerThread) -> None:
        """Generates in `thread`, until that is called off, beginning with what is cached of the prompt."""
        self.features.expect(prompt.keys, prompt.images)
        given, cache = prompt.inputs, None
        if 0 < prompt.images_end < len(prompt.token_ids) and self._may_split(prompt):
            given, cache = self._rest(prompt, namespace)
        self.num_prefilled += len(prompt.token_ids) - (prompt.images_end if cache is not None else 0)
        self._generate(given, cache, logits_processor=[_Chooser(self, thread)], max_new_tokens=_ENDLESS)

    def cached_tokens(self, prompt: ForeignPrompt, namespace: str) -> int:
        """Of the prompt, those whose keys and values are here."""
        return prompt.images_end if self._prefix_key(prompt, namespace) in self.prefixes else 0

    def _generate(self, given: dict[str, Any], cache: Any, **options: Any) -> Any:
        told = {} if cache is None else {_CACHE: cache}
        return self._model.generate(**given, **told, return_dict_in_generate=True, **options)

    def _rest(self, prompt: ForeignPrompt, namespace: str) -> tuple[dict[str, Any], Any]:
        """The inputs behind the images and a copy of the cache up to there, which is filled if it is new."""
        key = self._prefix_key(prompt, namespace)
        cache = self.prefixes.get(key)
        if cache is None:
            cache = self._filled(prompt)
            self.num_prefilled += prompt.images_end
            self.prefixes.put(key, copy.deepcopy(cache), tensor_bytes(cache))
        else:
            cache = copy.deepcopy(cache)
        return _only_text(prompt.inputs), cache

    def _prefix_key(self, prompt: ForeignPrompt, namespace: str) -> tuple[object, ...]:
        return namespace, prompt.keys, prompt.token_ids[: prompt.images_end]

    def _filled(self, prompt: ForeignPrompt) -> Any:
        """The cache of the prompt up to the end of its images."""
        length = len(prompt.token_ids)
        part = {
            name: value[:, : prompt.images_end]
            if name in _TEXT_INPUTS and value.shape[1] == length
            else value
            for name, value in prompt.inputs.items()
        }
        return self._generate(part, None, max_new_tokens=1)[_CACHE]

    def _may_split(self, prompt: ForeignPrompt) -> bool:
        """Whether the images' keys and values are the same whatever text follows them, which is tried once.
        Models whose whole prompt sees itself, as PaliGemma's, are computed anew for every question."""
        if self._is_causal is None and prompt.images_end < len(prompt.token_ids):
            try:
                whole = self._first_logits(prompt.inputs, None)
                parts = self._first_logits(_only_text(prompt.inputs), copy.deepcopy(self._filled(prompt)))
                spread = float(whole.max() - whole.min())
                self._is_causal = float((whole - parts).abs().max()) <= _AGREES * max(spread, 1e-6)
            except (ValueError, TypeError, RuntimeError, IndexError, AttributeError, KeyError) as error:
                log.info("no prefix can be kept of this model", exc_info=error)
                self._is_causal = False
        return bool(self._is_causal)

    def _first_logits(self, inputs: dict[str, Any], cache: Any) -> torch.Tensor:
        row: torch.Tensor = self._generate(inputs, cache, max_new_tokens=1, output_logits=True).logits[0][0]
        return row.float()

    def state(self) -> list[Any]:
        """What the model keeps in itself of the sequence that it computed last."""
        return [part.rope_deltas for part in self._stateful]

    def restore(self, state: list[Any]) -> None:
        for part, value in zip(self._stateful, state, strict=True):
            part.rope_deltas = value


class _Chooser(LogitsProcessor):
    """Leaves the one token that the answer's owner draws."""

    def __init__(self, model: ForeignModel, thread: AnswerThread) -> None:
        self._model, self._thread = model, thread

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._model.features.expect((), ())
        state = self._model.state()
        token = self._thread.choose(scores[0])
        self._model.restore(state)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, token] = 0.0
        return chosen


def _check_size(directory: Path) -> None:
    """Before memory is taken for it: transformers draws the weights that a checkpoint lacks at random.

    Raises CheckpointError where the files hold much less than the model that config.json describes.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:  # several weights in an element
        return
    held = sum(math.prod(entry.shape) for entry in read_index(directory).values())
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    needed = sum(parameter.numel() for parameter in model.parameters())
    if held < 0.9 * needed:
        raise CheckpointError(f"its files hold {held} weights, and the model of its config.json has {needed}")


def _only_text(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name in _TEXT_INPUTS}
