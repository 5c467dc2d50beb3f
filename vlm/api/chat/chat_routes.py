"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from vlm.api.chat.completion import chunks, completion
from vlm.api.chat.generate import admit
from vlm.api.chat.streaming import EventStream, until_disconnect
from vlm.api.guard.routes import ServiceRoute
from vlm.api.responses import BODY, EVENT_STREAM, ChatCompletion, errors
from vlm.api.service import caller_of, service_of
from vlm.requests.errors import ApiError
from vlm.requests.schemas import ChatRequest

router = APIRouter(route_class=ServiceRoute)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={
        200: {
            "model": ChatCompletion,
            "description": "The answer; with `stream`, server-sent chunks of it.",
            "content": EVENT_STREAM,
        },
        **errors(*BODY, 404),
    },
)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answers a chat with texts and images."""
    service = service_of(request)
    tier = body.service_tier if body.service_tier in ("flex", "batch", "priority") else "default"
    try:
        generation = await until_disconnect(
            request, admit(service, caller_of(request), body, request.headers)
        )
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            events = chunks(generation, include_usage=include_usage, service_tier=tier)
            return await EventStream(events, generation.close).begin(request)
        try:
            return JSONResponse(await until_disconnect(request, completion(generation, tier)))
        finally:
            generation.close()
    except ApiError as error:
        service.metrics.errors.labels(error.code).inc()
        raise
