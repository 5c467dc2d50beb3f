"""The runner of a foreign model behind the engine process's loop: requests and pixels in, events out."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llm.request import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestError,
    SamplingParams,
    Timings,
    Usage,
    VisualKey,
    WantVisual,
)
from llm.sampling.sampler import SamplerState, check_params, token_logprob
from llm.text.outputs import TextStream
from llm.text.tokenizer import Tokenizer
from preprocess.types import Tiles
from workers.anymodel.answer_thread import AnswerThread
from workers.anymodel.foreign_model import ForeignModel, ForeignPrompt

log = logging.getLogger(__name__)

FAULT = ("internal_error", "The engine failed while it worked on this request.")
TAKES = (
    "max_tokens, min_tokens, stop, stop_token_ids, temperature, top_k, top_p, min_p, seed, penalties, "
    "logit_bias, logprobs, ignore_eos and skip_special_tokens"
)
_CONSTRAINTS = {"regex": "guided_regex", "grammar": "guided_grammar"}  # others come by response_format


def check_supported(params: SamplingParams) -> None:
    """Raises RequestError, which names the parameter, for what only this project's own engine does."""
    named = {
        "n": params.n > 1,
        "beam_width": params.beam_width > 1,
        "prompt_logprobs": params.prompt_logprobs is not None,
        _CONSTRAINTS.get((params.constraint or ("", ""))[0], "response_format"): params.constraint
        is not None,
    }
    for name, is_asked in named.items():
        if is_asked:
            raise RequestError(
                "unsupported_parameter",
                f"'{name}' is not available: transformers runs this model. It takes {TAKES}.",
                name,
            )


@dataclass
class _Answer:
    """A request under way."""

    request: Request
    text: TextStream
    submitted: float
    sampler: SamplerState | None = None
    prompt: ForeignPrompt | None = None
    thread: AnswerThread | None = None
    row: np.ndarray | None = None  # logits of the next token
    num_tokens: int = 0
    cached_tokens: int = 0
    began: float = 0.0
    first_token: float = 0.0
    missing: set[VisualKey] = field(default_factory=set)

    @property
    def keys(self) -> tuple[VisualKey, ...]:
        return tuple(span.key for span in self.request.prompt.spans)


class ForeignRunner:
    """Every answer gets one token in turn, the one that waits longest first; a prompt is one turn. At most
    `max_running` are under way, interactive ones before batch work. Not thread-safe: one owner."""

    def __init__(
        self,
        model: ForeignModel,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        context_length: int,
        max_running: int,
        about: dict[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._vocab_size, self._context_length = vocab_size, context_length
        self._max_running, self._about, self._clock = max_running, about or {}, clock
        self._waiting: dict[str, _Answer] = {}
        self._running: list[_Answer] = []  # in the order of their turns
        self._pixels: dict[VisualKey, np.ndarray] = {}  # of requests that wait
        self._events: list[Event] = []
        self._counts: Counter[str] = Counter()

    def info(self) -> dict[str, Any]:
        return dict(self._about)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._events or any(not a.missing for a in self._waiting.values()))

    def submit(self, request: Request) -> None:
        """Raises `RequestError` for what can never be served."""
        check_params(request.params, self._vocab_size)
        check_supported(request.params)
        if request.prompt.text is None:
            raise RequestError("invalid_request", "The prompt has no text, and transformers takes no other.")
        answer = _Answer(request, TextStream(self._tokenizer, request.params), self._clock())
        answer.missing = {key for key in answer.keys if key not in self._pixels}
        self._waiting[request.id] = answer
        self._events += [WantVisual(request.id, key) for key in sorted(answer.missing)]

    def cancel(self, request_id: str) -> None:
        self._counts["cancelled"] += self._remove(request_id)
        self._events = [event for event in self._events if event.request_id != request_id]

    def put_tiles(self, key: VisualKey, tiles: Tiles) -> None:
        """An image at its own size, as its only tile."""
        waiting = [answer for answer in self._waiting.values() if key in answer.missing]
        for answer in waiting:
            answer.missing.discard(key)
        if waiting:
            self._pixels[key] = tiles.pixels[0]

    def fail_tiles(self, key: VisualKey, code: str, message: str) -> None:
        for answer in [answer for answer in self._waiting.values() if key in answer.missing]:
            self._fail(answer, code, message)

    def step(self) -> list[Event]:
        """One prompt or one token."""
        events, self._events = self._events, []
        answer = self._next()
        if answer is not None:
            try:
                self._advance(answer)
            except RequestError as error:
                self._fail(answer, error.code, error.message, error.param)
            except Exception:
                log.exception("a request failed in the model")
                self._fail(answer, *FAULT)
        told, self._events = events + self._events, []
        return told

    def stats(self) -> dict[str, Any]:
        kept, prefixes = self._model.features.kept, self._model.prefixes
        return {
            "engine": {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "prefilled_tokens": self._model.num_prefilled,
                "prefix_entries": len(prefixes),
                "prefix_bytes": prefixes.num_bytes,
                "prefix_hits": prefixes.hits,
                **self._counts,
            },
            "visual_cache": {"bytes": kept.num_bytes, "entries": len(kept), "hits": kept.hits},
            "encoder": {"calls": self._model.features.num_calls},
        }

    def clear_cache(self) -> None:
        self._model.features.kept.clear()
        self._model.prefixes.clear()

    def _next(self) -> _Answer | None:
        """Who has waited longest for a turn; a new answer takes its first one at once."""
        ready = [answer for answer in self._waiting.values() if not answer.missing]
        if ready and len(self._running) < self._max_running:
            chosen = min(ready, key=lambda answer: answer.request.priority == "batch")
            del self._waiting[chosen.request.id]
            self._running.append(chosen)
            return chosen
        if not self._running:
            return None
        self._running.append(self._running.pop(0))
        return self._running[-1]

    def _advance(self, answer: _Answer) -> None:
        if answer.thread is None:
            self._begin(answer)
            return
        assert answer.row is not None
        row = answer.row
        token = self._draw(answer, row)
        answer.num_tokens += 1
        self._counts["generated_tokens"] += 1
        if answer.num_tokens == 1:
            answer.first_token = self._clock()
        reason = self._tell(answer, token, row)
        if reason is not None:
            self._finish(answer, reason)
            return
        answer.row = answer.thread.resume(token)
        if answer.row is None:  # transformers itself ended it
            self._finish(answer, "length")

    def _ends(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer."""
        own: frozenset[int] = frozenset() if params.ignore_eos else self._tokenizer.eos_ids
        return own | frozenset(params.stop_token_ids)

    def _draw(self, answer: _Answer, row: np.ndarray) -> int:
        assert answer.sampler is not None
        params, mask = answer.request.params, None
        if answer.num_tokens < params.min_tokens:
            ends = self._tokenizer.eos_ids | frozenset(params.stop_token_ids)
            mask = np.ones(self._vocab_size, bool)
            mask[[end for end in ends if end < self._vocab_size]] = False
        token = answer.sampler.sample(row, answer.num_tokens, mask)
        answer.sampler.observe(token)
        return token

    def _begin(self, answer: _Answer) -> None:
        """The prompt is computed. Raises RequestError."""
        request = answer.request
        answer.began = self._clock()
        pixels = [self._pixels[key] for key in answer.keys]
        self._drop_pixels()
        assert request.prompt.text is not None
        prompt = answer.prompt = self._model.prompt(request.prompt.text, answer.keys, pixels)
        room = self._context_length - len(prompt.token_ids)
        if room < 1:
            raise RequestError(
                "context_length_exceeded",
                f"This model's maximum context length is {self._context_length} tokens. Your messages have "
                f"{len(prompt.token_ids)} tokens, images included, which leaves no room for an answer.",
                "messages",
            )
        params = request.params
        seed = secrets.randbits(63) if params.seed is None else params.seed
        ids = tuple(i for i in prompt.token_ids if i < self._vocab_size)  # an image's may have no logit
        answer.sampler = SamplerState(params, ids, self._vocab_size, seed)
        answer.cached_tokens = self._model.cached_tokens(prompt, request.namespace)
        answer.thread = AnswerThread(lambda thread: self._model.answer(prompt, request.namespace, thread))
        answer.row = answer.thread.begin()
        if answer.row is None:
            self._finish(answer, "length")

    def _tell(self, answer: _Answer, token: int, row: np.ndarray) -> FinishReason | None:
        """One token joins the answer; why it ends with it, if it does."""
        request, params = answer.request, answer.request.params
        assert answer.prompt is not None
        reason: FinishReason | None = None
        text, stopped = "", False
        if token in self._ends(params):
            reason = "stop"
        else:
            text, stopped = answer.text.push(token)
            room = self._context_length - len(answer.prompt.token_ids)
            if not stopped and answer.num_tokens >= min(params.max_tokens, room):
                reason = "length"
        if reason is not None:
            rest, stopped = answer.text.flush()
            text += rest
        if stopped:
            reason = "stop"
        logprobs = () if params.logprobs is None else (token_logprob(row, token, params.logprobs),)
        self._events.append(Delta(request.id, 0, (token,), text, logprobs))
        return reason

    def _finish(self, answer: _Answer, reason: FinishReason) -> None:
        self._remove(answer.request.id)
        self._counts[f"finished_{reason}"] += 1
        prompt, now = answer.prompt, self._clock()
        assert prompt is not None
        usage = Usage(len(prompt.token_ids), prompt.num_image_tokens, answer.cached_tokens, answer.num_tokens)
        first = answer.first_token or now
        timings = Timings(
            queue_ms=(answer.began - answer.submitted) * 1e3,
            prefill_ms=(first - answer.began) * 1e3,
            ttft_ms=(first - answer.submitted) * 1e3,
            tpot_ms=(now - first) * 1e3 / max(1, answer.num_tokens - 1),
            total_ms=(now - answer.submitted) * 1e3,
        )
        self._events.append(Finished(answer.request.id, 0, reason, usage, timings))

    def _fail(self, answer: _Answer, code: str, message: str, param: str | None = None) -> None:
        self._remove(answer.request.id)
        self._counts["failed"] += 1
        self._events.append(Failed(answer.request.id, code, message, param))

    def _remove(self, request_id: str) -> bool:
        """Ends a request and lets go of what it holds; False where it is not known."""
        answer = self._waiting.pop(request_id, None)
        for found in [found for found in self._running if found.request.id == request_id]:
            self._running.remove(found)
            answer = found
        if answer is None:
            return False
        if answer.thread is not None:
            answer.thread.end()
        self._drop_pixels()
        return True

    def _drop_pixels(self) -> None:
        """Those that no request waits with."""
        needed = {key for answer in self._waiting.values() for key in answer.keys}
        self._pixels = {key: pixels for key, pixels in self._pixels.items() if key in needed}
