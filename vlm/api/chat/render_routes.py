"""POST /v1/chat/completions/render: a chat as tokens, for engines that take such and for their routers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from llm.request import Prompt, SamplingParams
from vlm.api.chat.generate import prepare_chat
from vlm.api.guard.routes import ServiceRoute
from vlm.api.responses import BODY, Placeholder, RenderedChat, RenderedFeatures, errors
from vlm.api.service import caller_of, service_of
from vlm.remote.chat_body import settings_of
from vlm.requests.errors import invalid
from vlm.requests.schemas import ChatRequest

router = APIRouter(route_class=ServiceRoute)

_CONSTRAINTS = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "json_object": "json_object"}


@router.post("/v1/chat/completions/render", responses=errors(*BODY, 404))
async def render(body: ChatRequest, request: Request) -> RenderedChat:
    """The exact prompt of a chat, its images by their content, and its sampling parameters. Nothing is
    decoded or run."""
    service = service_of(request)
    prepared, _ = await prepare_chat(service, caller_of(request), body)
    if prepared.prompt.text is not None:
        raise invalid(
            "unsupported_parameter", "This model's own processor makes its tokens: transformers runs it."
        )
    asked = prepared.request
    return RenderedChat(
        request_id=asked.id,
        model=service.model_name,
        token_ids=list(asked.prompt.token_ids),
        features=_features(asked.prompt),
        sampling_params=_sampling(asked.params),
        cache_salt=asked.namespace or None,
        stream=bool(body.stream),
    )


def _features(prompt: Prompt) -> RenderedFeatures | None:
    """A hash names the image's visual tokens (its pixels as cut, and the encoder), and which of them."""
    if not prompt.spans:
        return None
    return RenderedFeatures(
        mm_hashes={"image": [f"{span.key}:{span.offset}:{span.length}" for span in prompt.spans]},
        mm_placeholders={
            "image": [Placeholder(offset=span.start, length=span.length) for span in prompt.spans]
        },
    )


def _sampling(params: SamplingParams) -> dict[str, Any]:
    sampling = settings_of(params)
    sampling.pop("response_format", None)
    if params.logprobs is not None:
        sampling["logprobs"] = params.logprobs
    if params.prompt_logprobs is not None:
        sampling["prompt_logprobs"] = params.prompt_logprobs
    if params.constraint is not None:
        kind, text = params.constraint
        sampling["structured_outputs"] = {_CONSTRAINTS[kind]: text or True}
    return sampling
