"""One chat request from admission to its last event, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace

from llm.request import (
    Delta,
    Failed,
    Finished,
    RequestError,
    SamplingParams,
    Timings,
    Usage,
    WantVisual,
)
from preprocess.limits import BYTES_PER_PIXEL
from vlm.api.chat.convert import prepare, prepare_text
from vlm.api.guard.admission import Ticket
from vlm.api.guard.auth import Caller
from vlm.api.observe.logs import note
from vlm.api.service import Service
from vlm.pipeline import ImageFailed, PreparedRequest
from vlm.prompt import Rendering
from vlm.requests.errors import ApiError, from_code, from_exception, invalid
from vlm.requests.params import check_model, check_supported, priority, sampling_params, without_words
from vlm.requests.sampling_schemas import SamplingFields
from vlm.requests.schemas import ChatRequest, CompletionRequest
from vlm.requests.tool_params import tool_use
from vlm.tools.call_grammar import answer_term, grammar
from vlm.tools.calls import ToolUse

MAX_VARIABLE_CHARS = 10_000  # of a chat template's, as JSON


@dataclass(eq=False)
class Generation:
    service: Service
    caller: Caller
    prepared: PreparedRequest
    ticket: Ticket
    deadline_s: float  # from the request's arrival
    headers: Mapping[str, str] = field(default_factory=dict)
    tool_use: ToolUse | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def id(self) -> str:
        return self.prepared.request.id

    @property
    def num_choices(self) -> int:
        return self.prepared.request.params.n

    async def events(self) -> AsyncGenerator[Delta | Finished, None]:
        """Raises ApiError when the request fails or its deadline passes. Closing it cancels the request."""
        arrived = self.prepared.started
        loop = asyncio.get_running_loop()
        end = loop.time() + self.deadline_s - (time.monotonic() - arrived)
        last_token: dict[int, float] = {}
        metrics = self.service.metrics
        try:
            async with contextlib.aclosing(self.service.pipeline.run(self.prepared)) as events:
                while True:
                    try:
                        async with asyncio.timeout_at(end):
                            event = await anext(events)
                    except StopAsyncIteration:
                        break
                    now = time.monotonic()
                    match event:
                        case Delta(choice=choice):
                            self.ticket.begun()
                            if choice in last_token and self.prepared.request.priority == "interactive":
                                metrics.itl.observe(now - last_token[choice])
                            elif not last_token:
                                metrics.ttft.observe(now - arrived)
                            last_token[choice] = now
                            yield event
                        case Finished():
                            self._finished(event, now - arrived)
                            yield event
                        case ImageFailed(code=code, message=message, image=image):
                            raise from_code(code, message, self.prepared.places[image])
                        case Failed(code=code, message=message, param=param):
                            is_tools = self.tool_use is not None and param == "response_format"
                            raise from_code(code, message, "tools" if is_tools else param)
                        case WantVisual():
                            pass
            if self.usage is None:
                raise ApiError(503, "engine_died", "The engine stopped while it worked on this request.")
        except TimeoutError:
            raise ApiError(
                503, "deadline_exceeded", "The request was not answered before its deadline."
            ) from None
        except ApiError:
            raise
        except Exception as error:
            raise from_exception(error) from None
        finally:
            self.close()

    def _finished(self, event: Finished, elapsed_s: float) -> None:
        self.service.metrics.success.labels(event.reason).inc()
        if event.usage is None:
            return
        self.usage, self.timings = event.usage, event.timings
        self.service.metrics.answered(event.usage, event.timings)
        self._account(event.usage)
        self.service.metrics.e2e.observe(elapsed_s)
        self.service.traces.request(self.id, self.headers, event.usage, event.timings)
        if event.timings:
            self.service.rates.learn(self.prepared, event.usage, event.timings)

    def _account(self, usage: Usage) -> None:
        name, limits = self.caller.name, self.service.limits(self.caller)
        self.service.quotas.spend_tokens(
            name, limits["tokens"], usage.prompt_tokens + usage.completion_tokens
        )
        self.service.metrics.spent(name, usage)
        note(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)

    def close(self) -> None:
        """Gives the place back. May be called more than once."""
        self.ticket.close(completed=self.usage is not None)


async def admit(
    service: Service, caller: Caller, body: ChatRequest, headers: Mapping[str, str] | None = None
) -> Generation:
    """Everything that can be refused before work begins. Raises ApiError."""
    _check_open(service, caller)
    prepared, use = await prepare_chat(service, caller, body)
    return _ticketed(service, caller, body, prepared, headers, use)


async def prepare_chat(
    service: Service, caller: Caller, body: ChatRequest
) -> tuple[PreparedRequest, ToolUse | None]:
    """The prompt and its cost; nothing is decoded. Raises ApiError."""
    params = _params(service, body)
    use = tool_use(body)
    if use is not None:
        params = _with_calls(service, params, use)
    media = body.mm_processor_kwargs
    prepared = await prepare(
        service,
        caller,
        f"chatcmpl-{uuid.uuid4().hex}",
        body.messages,
        params,
        priority(body),
        rendering(body),
        body.cache_salt or "",
        media.max_pixels if media else None,
    )
    return prepared, use


async def admit_text(
    service: Service,
    caller: Caller,
    body: CompletionRequest,
    prompt: str | list[int],
    headers: Mapping[str, str] | None = None,
) -> Generation:
    """As `admit`, of one prompt of several. Raises ApiError."""
    params = _params(service, body)
    _check_open(service, caller)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    prepared = await prepare_text(
        service, caller, request_id, prompt, params, priority(body), body.cache_salt or ""
    )
    return _ticketed(service, caller, body, prepared, headers)


def _params(service: Service, body: ChatRequest | CompletionRequest) -> SamplingParams:
    check_model(body.model, service.model_name)
    check_supported(body)
    params = sampling_params(body, service.config)
    return (
        without_words(params, body.bad_words, service.pipeline.spec.tokenizer) if body.bad_words else params
    )


def _check_open(service: Service, caller: Caller) -> None:
    service.admission.check_open(service.pipeline.engine.ready)
    service.quotas.check_tokens(caller.name, service.limits(caller)["tokens"])


def _ticketed(
    service: Service,
    caller: Caller,
    body: SamplingFields,
    prepared: PreparedRequest,
    headers: Mapping[str, str] | None,
    use: ToolUse | None = None,
) -> Generation:
    deadline_s = min(body.deadline_s or service.config.request_deadline_s, service.config.request_deadline_s)
    unique = {image.key: image for image in prepared.images}.values()
    decoded_bytes = sum(
        BYTES_PER_PIXEL * image.info.width * image.info.height + image.info.num_bytes for image in unique
    )
    ticket = service.admission.admit(
        decoded_bytes, prepared.request.priority, deadline_s, service.pipeline.engine.ready
    )
    return Generation(service, caller, prepared, ticket, deadline_s, headers or {}, use)


def rendering(body: ChatRequest) -> Rendering:
    """How the chat is written. Raises ApiError 400."""
    use = tool_use(body)
    variables = body.chat_template_kwargs or {}
    if len(json.dumps(variables)) > MAX_VARIABLE_CHARS:
        name = "chat_template_kwargs"
        raise invalid("invalid_value", f"'{name}' has more than {MAX_VARIABLE_CHARS} characters.", name)
    return Rendering(
        use.tools if use else (),
        variables,
        begins_answer=body.add_generation_prompt is not False,
        continues_last=bool(body.continue_final_message),
    )


def _with_calls(service: Service, params: SamplingParams, use: ToolUse) -> SamplingParams:
    """Constrained to text, or what the request's format describes, or calls. Raises ApiError 400."""
    form = service.pipeline.spec.prompt_builder.call_form
    try:
        answer = None if use.must_call else answer_term(params.constraint)
        skipped = None if form.specials else params.skip_special_tokens  # a call's own add no text
        constraint = ("grammar", grammar(use, form, answer))
        return replace(params, constraint=constraint, skip_special_tokens=skipped)
    except RequestError as error:
        raise from_exception(error) from None
