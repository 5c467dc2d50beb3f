"""The playground at `/`: three files from the package, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response

from vlm.api.guard.routes import OPEN, ServiceRoute
from vlm.requests.errors import ApiError

router = APIRouter(route_class=ServiceRoute, include_in_schema=False)

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "playground.js": "text/javascript; charset=utf-8",
    "playground.css": "text/css; charset=utf-8",
}
_FILES = {name: (_FOLDER / name).read_bytes() for name in _TYPES}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}


@router.get("/", openapi_extra=OPEN)
async def index() -> Response:
    return Response(_FILES["index.html"], media_type=_TYPES["index.html"], headers=_HEADERS)


@router.get("/static/{name}", openapi_extra=OPEN)
async def static(name: str) -> Response:
    if name not in _FILES:
        raise ApiError(404, "not_found", "Nothing is served at this address.")
    return Response(_FILES[name], media_type=_TYPES[name], headers=_HEADERS)
