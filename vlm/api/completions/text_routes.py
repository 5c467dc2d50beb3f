"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from vlm.api.chat.generate import Generation, admit_text
from vlm.api.chat.streaming import EventStream, until_disconnect
from vlm.api.completions.text_events import text_chunks, text_completion
from vlm.api.guard.routes import ServiceRoute
from vlm.api.responses import BODY, EVENT_STREAM, TextCompletion, errors
from vlm.api.service import caller_of, service_of
from vlm.requests.errors import ApiError, invalid
from vlm.requests.schemas import CompletionRequest

router = APIRouter(route_class=ServiceRoute)


@router.post(
    "/v1/completions",
    response_model=None,
    responses={
        200: {
            "model": TextCompletion,
            "description": "The continuations; with `stream`, server-sent chunks of them.",
            "content": EVENT_STREAM,
        },
        **errors(*BODY, 404),
    },
)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Goes on with texts as they are; chats and images are for the other routes."""
    service = service_of(request)
    prompts = _prompts(body)
    tokenizer = service.pipeline.spec.tokenizer
    generations: list[Generation] = []

    def close() -> None:
        for generation in generations:
            generation.close()

    async def begin() -> None:
        for prompt in prompts:
            generations.append(await admit_text(service, caller_of(request), body, prompt, request.headers))

    try:
        try:
            await until_disconnect(request, begin())
            echoed = [
                "" if not body.echo else prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
                for prompt in prompts
            ]
            if body.stream:
                include_usage = bool(body.stream_options and body.stream_options.include_usage)
                chunks = text_chunks(generations, echoed, include_usage=include_usage)
                return await EventStream(chunks, close).begin(request)
        except BaseException:
            close()
            raise
        try:
            return JSONResponse(await until_disconnect(request, text_completion(generations, echoed)))
        finally:
            close()
    except ApiError as error:
        service.metrics.errors.labels(error.code).inc()
        raise


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Raises ApiError 400 for an empty list."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise invalid("invalid_value", "'prompt' is empty.", "prompt")
    if isinstance(given[0], int):
        return [given]
    return given
