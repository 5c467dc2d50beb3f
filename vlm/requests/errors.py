"""Errors as the official client expects them: one shape, fixed texts, hints on whether to retry."""

from __future__ import annotations

import math
import re
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from llm.request import RequestError
from preprocess.types import ImageError
from workers.contract.engine_client import EngineUnavailable
from workers.contract.faults import OURS, TRANSIENT

MAX_RETRY_AFTER_S = 120  # the official client gives up on longer waits

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

# What a client did not cause
_SERVER_FAULTS = dict.fromkeys(TRANSIENT, 503) | dict.fromkeys(OURS, 500)

_STATUS_TEXTS = {
    400: ("invalid_request", "The request could not be understood."),
    401: ("invalid_api_key", "A valid API key is required."),
    404: ("not_found", "Nothing is served at this address."),
    405: ("method_not_allowed", "This address does not support this method."),
    413: ("request_too_large", "The request is too large."),
    415: ("unsupported_media_type", "The content type is not supported."),
}
INTERNAL = ("internal_error", "The server failed to process the request.")


NO_JSON = ("invalid_json", "The request body is not valid JSON in UTF-8.")


class ApiError(HTTPException):
    """An error with everything its response needs. `message` must be a fixed text or made of numbers and
    names that the client itself sent."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        *,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


def invalid(code: str, message: str, param: str | None = None) -> ApiError:
    return ApiError(400, code, message, param)


def unknown_model(served: str) -> ApiError:
    """What was asked for is not repeated: it is the client's text."""
    return ApiError(
        404, "model_not_found", f"This server does not serve this model. It serves {served!r}.", "model"
    )


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: ApiError) -> JSONResponse:
    headers = dict(error.headers or {})
    if error.status_code in (429, 503):
        wait_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(error.retry_after_s or 1)))
        headers["retry-after"] = str(wait_s)
    elif error.status_code != 408:
        headers["x-should-retry"] = "false"
    body = error_body(error.status_code, error.code, error.message, error.param)
    return JSONResponse(body, error.status_code, headers)


def from_code(code: str, message: str, param: str | None = None) -> ApiError:
    """An error of the pipeline or the engine: the client's own unless its code says otherwise."""
    status = _SERVER_FAULTS.get(code, 400)
    return ApiError(status, code, message, param)


def from_exception(error: Exception) -> ApiError:
    """Raises `error` again if it is none that a client may see."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ImageError | RequestError):
        return from_code(error.code, error.message, getattr(error, "param", None) or "messages")
    if isinstance(error, EngineUnavailable):
        return ApiError(503, "engine_unavailable", "The engine is not ready. Please try again.")
    raise error


# Names that pydantic puts into a location but clients never wrote.
_NOT_FIELDS = {"body", "query", "path", "string", "list", "str", "int", "float", "bool"} | {
    "text_list",
    "token_list",
    "token_lists",
    "part",
}
_FIELD = re.compile(r"[a-z][a-z0-9_]{0,63}")


def _param(location: tuple[Any, ...]) -> str | None:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in _NOT_FIELDS and _FIELD.fullmatch(part):
            text += f".{part}" if text else part
    return text[:200] or None


def from_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    kind = first["type"]
    if kind == "json_invalid":
        return invalid(*NO_JSON)
    location = tuple(first["loc"])
    param = _param(location)
    if kind == "extra_forbidden":
        shown = f": '{param}'" if param else ""
        return invalid("unknown_parameter", f"This parameter is not known here{shown}.", param)
    if param is None:
        return invalid("invalid_request", "The request body must be a JSON object.")
    if kind == "missing":
        return invalid("missing_required_parameter", f"Missing required parameter: '{param}'.", param)
    message = str(first["msg"]).removeprefix("Value error, ")[:300]
    return invalid("invalid_value", f"Invalid value for '{param}': {message}.", param)


def install_handlers(app: FastAPI) -> None:
    async def on_http(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, ApiError):
            return error_response(error)
        assert isinstance(error, StarletteHTTPException)
        status = error.status_code
        code, message = _STATUS_TEXTS.get(status, _STATUS_TEXTS[400] if status < 500 else INTERNAL)
        headers = dict(error.headers) if error.headers else None
        return error_response(ApiError(status, code, message, headers=headers))

    async def on_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error))

    async def on_known(request: Request, error: Exception) -> JSONResponse:
        return error_response(from_exception(error))

    app.add_exception_handler(StarletteHTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)
    for known in (ImageError, RequestError, EngineUnavailable):
        app.add_exception_handler(known, on_known)
