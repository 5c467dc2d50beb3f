"""/v1/files."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse
from starlette.datastructures import UploadFile

from vlm.api.guard.routes import ServiceRoute
from vlm.api.responses import BODY, Deleted, FileList, FileOut, errors
from vlm.api.service import caller_of, service_of
from vlm.api.storage.files import LIFETIMES_S, StoredFile, check_expiry, check_purpose
from vlm.requests.errors import ApiError, invalid

router = APIRouter(route_class=ServiceRoute)

_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch", "vision", "user_data"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": LIFETIMES_S[0],
                            "maximum": LIFETIMES_S[1],
                        },
                    },
                }
            }
        },
    }
}


def _out(file: StoredFile) -> FileOut:
    return FileOut(**asdict(file))


@router.post("/v1/files", openapi_extra=_FORM, responses=errors(*BODY))
async def upload(request: Request) -> FileOut:
    """Stores a file: requests of a batch (JSON lines), or anything to keep."""
    service = service_of(request)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise ApiError(415, "unsupported_media_type", "Send a form with 'file' and 'purpose'.")
    async with request.form(max_files=1, max_fields=8) as form:
        part = form.get("file")
        if not isinstance(part, UploadFile):
            raise invalid("missing_required_parameter", "The form has no file named 'file'.", "file")
        purpose = check_purpose(form.get("purpose"))
        lifetime_s = check_expiry(form.get("expires_after[anchor]"), form.get("expires_after[seconds]"))
        name = (part.filename or "file")[:256]
        stored = await asyncio.to_thread(
            service.files.add, caller_of(request).namespace, name, purpose, part.file, lifetime_s
        )
    return _out(stored)


@router.get("/v1/files", responses=errors(400, 401))
async def listing(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: Annotated[str | None, Query(max_length=64)] = None,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    order: Literal["asc", "desc"] = "desc",
) -> FileList:
    """The caller's files, newest first unless `order` is asc."""
    service = service_of(request)
    files = await asyncio.to_thread(service.files.list, caller_of(request).namespace, purpose)
    if order == "asc":
        files.reverse()
    ids = [file.id for file in files]
    if after is not None:
        if after not in ids:
            raise invalid("invalid_value", "File not found.", "after")
        files = files[ids.index(after) + 1 :]
    page = files[:limit]
    return FileList(
        data=[_out(file) for file in page],
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(files) > limit,
    )


@router.get("/v1/files/{file_id}", responses=errors(401, 404))
async def describe(file_id: str, request: Request) -> FileOut:
    """What is known of a file."""
    service = service_of(request)
    return _out(await asyncio.to_thread(service.files.get, caller_of(request).namespace, file_id))


@router.delete("/v1/files/{file_id}", responses=errors(401, 404))
async def delete(file_id: str, request: Request) -> Deleted:
    """Removes a file; a batch that reads it goes on."""
    service = service_of(request)
    await asyncio.to_thread(service.files.delete, caller_of(request).namespace, file_id)
    return Deleted(id=file_id, object="file", deleted=True)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=FileResponse,
    responses={
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        **errors(401, 404),
    },
)
async def content(file_id: str, request: Request) -> FileResponse:
    """A file's bytes."""
    service = service_of(request)
    path, found = await asyncio.to_thread(service.files.locate, caller_of(request).namespace, file_id)
    return FileResponse(path, media_type="application/octet-stream", stat_result=found)
