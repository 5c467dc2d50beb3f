"""POST /v1/responses, and GET and DELETE of those that are stored."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from vlm.api.chat.generate import admit
from vlm.api.chat.streaming import EventStream, until_disconnect
from vlm.api.guard.routes import ServiceRoute
from vlm.api.openai_responses.response_events import events, response
from vlm.api.responses import BODY, EVENT_STREAM, Deleted, ResponseOut, errors
from vlm.api.service import caller_of, service_of
from vlm.requests.errors import ApiError
from vlm.requests.response_schemas import ResponseChat, ResponsesRequest

router = APIRouter(route_class=ServiceRoute)
_GOT: dict[int | str, dict[str, Any]] = {
    200: {"model": ResponseOut, "description": "The response."},
    **errors(401, 404, 431),
}


@router.post(
    "/v1/responses",
    response_model=None,
    responses={
        200: {
            "model": ResponseOut,
            "description": "The response; with `stream`, server-sent events of it.",
            "content": EVENT_STREAM,
        },
        **errors(*BODY, 404),
    },
)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answers texts, images and documents, after a stored response or from the beginning."""
    service, caller = service_of(request), caller_of(request)
    try:
        earlier = (
            service.stored.get(caller, body.previous_response_id, "previous_response_id").messages
            if body.previous_response_id
            else ()
        )
        chat = ResponseChat(body, earlier, partial(service.stored.find_item, caller))
        try:
            generation = await until_disconnect(
                request, admit(service, caller, chat.request, request.headers)
            )
        except ApiError as error:
            raise chat.placed(error) from None

        def keep(answered: dict[str, Any], message: dict[str, Any]) -> None:
            messages = (*earlier, *chat.added, message)
            answered["store"] = body.store is not False and service.stored.put(caller, answered, messages)

        if body.stream:
            return await EventStream(events(generation, body, keep), generation.close).begin(request)
        try:
            return JSONResponse(await until_disconnect(request, response(generation, body, keep)))
        except ApiError as error:
            raise chat.placed(error) from None
        finally:
            generation.close()
    except ApiError as error:
        service.metrics.errors.labels(error.code).inc()
        raise


@router.get("/v1/responses/{response_id}", response_model=None, responses=_GOT)
async def get_response(response_id: str, request: Request) -> JSONResponse:
    """A stored response of this key."""
    return JSONResponse(service_of(request).stored.get(caller_of(request), response_id).response)


@router.delete("/v1/responses/{response_id}", responses=errors(401, 404, 431))
async def delete_response(response_id: str, request: Request) -> Deleted:
    """Later requests can't go on from it; those that did still can be."""
    service_of(request).stored.delete(caller_of(request), response_id)
    return Deleted(id=response_id, object="response", deleted=True)
