"""Every route is of this class: authentication comes before a body is read, and is the default.

A route is open only if it says so itself, with `openapi_extra=OPEN`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi import Request, Response
from fastapi.routing import APIRoute

from vlm.api.service import service_of

OPEN: dict[str, Any] = {"security": []}
LARGE_BODY_BYTES = 256 << 10  # parsed off the event loop from here on


def parse_json(body: bytes) -> Any:
    """Strict JSON. Raises json.JSONDecodeError, which FastAPI knows."""
    try:
        return pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError:
        raise json.JSONDecodeError("invalid", "", 0) from None


class ServiceRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        if len(body) < LARGE_BODY_BYTES:
            return parse_json(body)
        pool = service_of(self).parsers
        return await asyncio.get_running_loop().run_in_executor(pool, parse_json, body)


class ServiceRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        is_open = bool(self.openapi_extra) and (self.openapi_extra or {}).get("security") == []
        limited = "POST" in (self.methods or ())

        async def handle(request: Request) -> Response:
            service = service_of(request)
            if not is_open:
                caller, key = service.keys.authenticate(request.headers.get("authorization", ""))
                request.state.caller = caller
                per_minute = service.config.requests_per_minute
                if key is not None and key.requests_per_minute >= 0:
                    per_minute = key.requests_per_minute
                if limited:
                    service.limiter.take(caller.name, per_minute)
            return await handler(ServiceRequest(request.scope, request.receive))

        return handle
