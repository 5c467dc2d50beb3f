"""Every route is of this class: authentication comes before a body is read, and is the default.

A route is open only if it says so itself, with `openapi_extra=OPEN`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData

from vlm.api.observe.logs import note
from vlm.api.service import service_of
from vlm.requests.errors import ApiError, invalid
from vlm.requests.strict_json import MAX_VALUES, TooManyValues, parse

if TYPE_CHECKING:
    from starlette.requests import AwaitableOrContextManager

OPEN: dict[str, Any] = {"security": []}
LARGE_BODY_BYTES = 256 << 10  # parsed off the event loop from here on
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")


def parse_json(body: bytes) -> Any:
    """Strict JSON. Raises json.JSONDecodeError, which FastAPI knows, and ApiError 400."""
    try:
        return parse(body)
    except TooManyValues:
        raise invalid(
            "request_too_complex", f"The request body has more than {MAX_VALUES} JSON values."
        ) from None
    except ValueError:
        raise json.JSONDecodeError("invalid", "", 0) from None


def _check_type(content_type: str) -> None:
    """A page of any site may send a browser's other types here without asking. Raises ApiError 415."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        given = "has no content-type" if not kind else "has another content-type"
        raise ApiError(
            415,
            "unsupported_media_type",
            f"The request {given}: its body is JSON, sent with 'content-type: application/json'.",
        )


class ServiceRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LARGE_BODY_BYTES:
            return parse_json(body)
        pool = service_of(self).parsers
        return await asyncio.get_running_loop().run_in_executor(pool, parse_json, body)

    def form(self, **limits: Any) -> AwaitableOrContextManager[FormData]:
        """Raises ApiError 415 for a charset that the client chose: any of Python's codecs would be used,
        some of which fail on every text or decode to what can't be encoded again."""
        _, options = parse_options_header(self.headers.get("content-type", ""))
        charset = options.get(b"charset", b"utf-8").strip().lower()
        if charset not in _CHARSETS:
            raise ApiError(415, "unsupported_media_type", "A form's charset must be utf-8.")
        return super().form(**limits)


class ServiceRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        is_open = bool(self.openapi_extra) and (self.openapi_extra or {}).get("security") == []
        limited = "POST" in (self.methods or ())
        takes_json = self.body_field is not None

        async def handle(request: Request) -> Response:
            service = service_of(request)
            if not is_open:
                caller = service.keys.authenticate(request.headers)
                request.state.caller = caller
                if caller.name:
                    note(caller=caller.name)
                if limited:
                    service.quotas.take_request(caller.name, service.limits(caller)["requests"])
            if takes_json:
                _check_type(request.headers.get("content-type", ""))
            return await handler(ServiceRequest(request.scope, request.receive))

        return handle
