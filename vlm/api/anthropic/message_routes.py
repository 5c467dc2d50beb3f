"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients send them."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from llm.request import SamplingParams
from vlm.api.anthropic.message_events import events, message
from vlm.api.chat.convert import prepare
from vlm.api.chat.generate import admit, rendering
from vlm.api.chat.streaming import EventStream, until_disconnect
from vlm.api.guard.routes import ServiceRoute
from vlm.api.responses import BODY, EVENT_STREAM, AnthropicMessage, InputTokens, errors
from vlm.api.service import caller_of, service_of
from vlm.requests.anthropic_schemas import CountRequest, MessagesRequest, chat_of
from vlm.requests.errors import ApiError
from vlm.requests.params import check_model

router = APIRouter(route_class=ServiceRoute)


@router.post(
    "/v1/messages",
    response_model=None,
    responses={
        200: {
            "model": AnthropicMessage,
            "description": "The answer; with `stream`, server-sent events of it.",
            "content": EVENT_STREAM,
        },
        **errors(*BODY, 404),
    },
)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answers a chat in Anthropic's form."""
    service = service_of(request)
    try:
        generation = await until_disconnect(
            request, admit(service, caller_of(request), chat_of(body), request.headers)
        )
        if body.stream:
            return await EventStream(events(generation), generation.close).begin(request)
        try:
            return JSONResponse(await until_disconnect(request, message(generation)))
        finally:
            generation.close()
    except ApiError as error:
        service.metrics.errors.labels(error.code).inc()
        raise


@router.post("/v1/messages/count_tokens", responses=errors(*BODY, 404))
async def count_tokens(body: CountRequest, request: Request) -> InputTokens:
    """The length of the true prompt, images expanded; nothing is decoded or run."""
    service = service_of(request)
    check_model(body.model, service.model_name)
    chat = chat_of(body)
    prepared = await prepare(
        service,
        caller_of(request),
        f"cost-{uuid.uuid4().hex}",
        chat.messages,
        SamplingParams(max_tokens=1),
        rendering=rendering(chat),
    )
    return InputTokens(input_tokens=prepared.prompt.num_tokens)
