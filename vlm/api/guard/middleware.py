"""Around every request: its id, the caps on headers and body, the last resort for errors, log and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm.api.observe.logs import access
from vlm.api.observe.logs import request_id as current_request_id
from vlm.api.service import Service
from vlm.config import MEBIBYTE
from vlm.requests.errors import INTERNAL, ApiError, error_response

log = logging.getLogger("vlm.api")

MAX_HEADERS = 100
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MULTIPART_OVERHEAD = 64 << 10
_DRAIN_BYTES = 8 << 20  # read on after a refusal, so that the client gets to see it
_DRAIN_S = 1.0
_CLOSE = {"connection": "close"}
_METHODS = frozenset(("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"))  # by name in metrics


class BodyGuard:
    """`receive` with a cap and a deadline; the bytes it let in count until `release`."""

    def __init__(self, receive: Receive, service: Service, cap: int) -> None:
        self._receive = receive
        self._service = service
        self._cap = cap
        self._deadline = asyncio.get_running_loop().time() + service.config.body_timeout_s
        self._num_bytes = 0
        self._done = False

    async def receive(self) -> Message:
        if self._done:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408, "request_timeout", "The request's body took too long.", headers=_CLOSE
            ) from None
        if message["type"] != "http.request":
            self._done = True
            return message
        size = len(message.get("body", b""))
        self._num_bytes += size
        self._service.body_bytes += size
        self._done = not message.get("more_body", False)
        if self._num_bytes > self._cap:
            await self.refuse(too_large(self._cap))
        others = self._service.body_bytes - self._num_bytes
        if others and self._service.body_bytes > self._service.config.max_bodies_mb * MEBIBYTE:
            await self.refuse(
                ApiError(
                    503, "bodies_in_flight", "Too many request bytes are being processed.", headers=_CLOSE
                )
            )
        return message

    async def refuse(self, error: ApiError) -> None:
        """Raises `error`, after reading on for a moment."""
        drained = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                while not self._done and drained < _DRAIN_BYTES:
                    message = await self._receive()
                    drained += len(message.get("body", b""))
                    self._done = not message.get("more_body", False)
        raise error

    def release(self) -> None:
        self._service.body_bytes -= self._num_bytes
        self._num_bytes = 0


def too_large(cap: int) -> ApiError:
    return ApiError(
        413, "request_too_large", f"The request's body is larger than {cap} bytes.", headers=_CLOSE
    )


def encoded() -> ApiError:
    return ApiError(
        415,
        "unsupported_content_encoding",
        "Compressed request bodies are not supported: send the body without a content-encoding.",
        headers={**_CLOSE, "accept-encoding": "identity"},
    )


class PrefixMiddleware:
    """Requests come with the prefix or without it, as a proxy passes it on or cuts it off; behind this
    middleware it is always there."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        prefix, path = self._root_path, scope["path"]
        if path == prefix:  # the page's own addresses are relative to a folder
            await RedirectResponse(f"{prefix}/")(scope, receive, send)
            return
        if not path.startswith(f"{prefix}/"):
            path = prefix + path
        await self._app({**scope, "root_path": prefix, "path": path}, receive, send)


class HeadMiddleware:
    """HEAD is answered wherever GET is, with the headers of its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_only(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, headers_only)


class ServiceMiddleware:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    def _body_cap(self, path: str) -> int:
        config = self._service.config
        if path == "/v1/files":
            return config.max_file_mb * MEBIBYTE + _MULTIPART_OVERHEAD
        return config.max_request_mb * MEBIBYTE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        sent = headers.get("x-request-id", "")
        request_id = sent if _REQUEST_ID.fullmatch(sent) else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        current_request_id.set(request_id)
        line: dict[str, Any] = {}
        access.set(line)
        cap = self._body_cap(scope["path"].removeprefix(scope.get("root_path", "")))
        guard = BodyGuard(receive, self._service, cap)
        started = time.monotonic()
        status = 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = request_id
                added["x-content-type-options"] = "nosniff"
                added.setdefault("cache-control", "no-store")
                caller = scope["state"].get("caller")
                if caller is not None:
                    added.update(self._service.quotas.headers(caller.name, self._service.limits(caller)))
            await send(message)

        try:
            if len(scope["headers"]) > MAX_HEADERS:
                raise ApiError(431, "too_many_headers", "The request has too many headers.", headers=_CLOSE)
            if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                await guard.refuse(encoded())
            length = headers.get("content-length", "")
            if length.isdecimal() and (len(length) > 18 or int(length) > cap):
                await guard.refuse(too_large(cap))
            await self._app(scope, guard.receive, send_on)
        except ApiError as error:
            if not status:
                await error_response(error)(scope, receive, send_on)
        except ClientDisconnect:
            status = status or 499
        except Exception:
            log.exception("unhandled error")
            if not status:
                await error_response(ApiError(500, *INTERNAL))(scope, receive, send_on)
        finally:
            guard.release()
            self._record(scope, status or 499, started, line)

    def _record(self, scope: Scope, status: int, started: float, line: dict[str, Any]) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._service.metrics.http.labels(method, route, str(status)).inc()
        if not route.startswith("/health"):
            log.info(
                "request",
                extra={
                    "method": method,
                    "route": route,
                    "status": status,
                    "ms": round((time.monotonic() - started) * 1e3, 1),
                    **line,
                },
            )
