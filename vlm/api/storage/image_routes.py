"""Upload an image once, then ask about it by id."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from preprocess.types import ImageError
from vlm.api.costs import grid_out
from vlm.api.guard.routes import ServiceRequest, ServiceRoute
from vlm.api.responses import BODY, Deleted, StoredImage, errors
from vlm.api.service import Service, caller_of, service_of
from vlm.api.storage.image_store import KeptImage, image_id
from vlm.pipeline import ImageInput, PlannedImage
from vlm.requests.errors import NO_JSON, ApiError, invalid
from vlm.requests.media import Inline, check_base64_size, decode_base64, parse_url
from vlm.requests.schemas import ImageUpload

router = APIRouter(route_class=ServiceRoute)

_BODIES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "properties": {"file": {"type": "string", "format": "binary"}},
                }
            },
            "application/json": {"schema": ImageUpload.model_json_schema()},
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}


def _described(stored_id: str, entry: KeptImage, image: PlannedImage) -> StoredImage:
    return StoredImage(
        id=stored_id,
        created_at=int(entry.created_at),
        expires_at=int(entry.expires_at),
        bytes=image.info.num_bytes,
        format=image.info.format,
        width=image.info.width,
        height=image.info.height,
        tiles=image.grid.num_tiles,
        image_tokens=image.num_tokens,
        grid=grid_out(image.grid),
    )


async def _plan(service: Service, data: bytes) -> PlannedImage:
    """Raises ApiError 400."""
    try:
        return await asyncio.get_running_loop().run_in_executor(
            service.parsers, service.pipeline.plan_image, ImageInput(data)
        )
    except ImageError as error:
        raise invalid(error.code, error.message, "image") from None


async def _uploaded(request: Request, service: Service) -> tuple[bytes, str | None]:
    """(bytes, the id that the client expects). Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with request.form(max_files=1, max_fields=4) as form:
            part = form.get("file") or form.get("image")
            if not isinstance(part, UploadFile):
                raise invalid("missing_required_parameter", "The form has no file named 'file'.", "file")
            expected = form.get("id")
            return await part.read(), expected if isinstance(expected, str) else None
    if kind == "application/json":
        try:
            body = ImageUpload.model_validate(await ServiceRequest(request.scope, request.receive).json())
        except ValidationError:
            raise invalid("invalid_value", "Give {'image': 'data:image/png;base64,...'}.", "image") from None
        except ValueError:
            raise invalid(*NO_JSON) from None
        source = parse_url(body.image, "image", allow_urls=False)
        if not isinstance(source, Inline):
            raise invalid("invalid_image_url", "An upload must be a data: URI.", "image")
        check_base64_size(source.base64, service.pipeline.limits.max_bytes, "image")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(service.parsers, decode_base64, source.base64, "image"), body.id
    if kind == "application/octet-stream" or kind.startswith("image/"):
        return await request.body(), None
    raise ApiError(
        415,
        "unsupported_media_type",
        "Send a form with a file, raw bytes (application/octet-stream), or JSON with a data: URI.",
    )


@router.post("/v1/images", openapi_extra=_BODIES, responses=errors(*BODY, 409))
async def upload(request: Request) -> StoredImage:
    """Nothing is decoded; the id then stands for the image as an `image_url.url`."""
    service, caller = service_of(request), caller_of(request)
    data, expected = await _uploaded(request, service)
    planned = await _plan(service, data)
    stored_id = image_id(caller.namespace, planned.info.sha256)
    if expected is not None and expected != stored_id:
        raise invalid("image_id_conflict", "This id does not belong to this image.", "id")
    _, entry = await service.images.put(caller.namespace, planned.info.sha256, data)
    return _described(stored_id, entry, planned)


@router.get("/v1/images/{image_id}", responses=errors(401, 404))
async def describe(image_id: str, request: Request) -> StoredImage:
    """What is known of a stored image."""
    service = service_of(request)
    entry = await service.images.entry(caller_of(request).namespace, image_id)
    return _described(image_id, entry, await _plan(service, entry.data))


@router.delete("/v1/images/{image_id}", responses=errors(401, 404))
async def forget(image_id: str, request: Request) -> Deleted:
    """Removes a stored image; requests that have read it go on."""
    await service_of(request).images.delete(caller_of(request).namespace, image_id)
    return Deleted(id=image_id, object="image", deleted=True)
