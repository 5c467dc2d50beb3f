"""Content parts as clients send them, and the bytes they stand for: images, and documents as their pages."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from preprocess.types import Detail, ImageError
from vlm.api.guard.auth import Caller
from vlm.api.service import Service
from vlm.requests.errors import from_code, invalid
from vlm.requests.media import (
    Inline,
    Remote,
    Source,
    Stored,
    Uploaded,
    check_base64_size,
    decode_base64,
    parse_url,
)
from vlm.requests.page_range import ALL, PageRange
from vlm.requests.schemas import ContentPart, FileIn, ImageUrl
from workers.contract.streams import end_tasks

SUPPORTED_PARTS = "Content parts are of type text, image_url or file."
_IMAGE_PURPOSES = ("vision", "user_data")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """One image; with `pages`, those of a document."""

    source: Source
    detail: Detail
    param: str  # messages[i].content[j].image_url.url
    pages: PageRange | None = None


def read_part(service: Service, part: ContentPart, place: str) -> str | ImageRef:
    """Raises ApiError 400 with the part's place as `param`."""
    match part.type:
        case "text":
            if part.text is None:
                raise invalid("missing_required_parameter", "A text part has no text.", f"{place}.text")
            return part.text
        case "image_url":
            image = part.image_url
            if image is None:
                raise invalid("missing_required_parameter", "An image part has no url.", f"{place}.image_url")
            if isinstance(image, str):
                image = ImageUrl(url=image, detail="auto")
            param = f"{place}.image_url.url"
            return ImageRef(
                parse_url(image.url, param, allow_urls=service.config.fetches_urls), image.detail, param
            )
        case "file":
            return _document(service, part.file, f"{place}.file")
        case _:
            raise invalid(
                "unsupported_content_part",
                f"This type of content part is not supported. {SUPPORTED_PARTS}",
                f"{place}.type",
            )


def _document(service: Service, file: FileIn | None, place: str) -> ImageRef:
    if file is None or (file.file_data is None) == (file.file_id is None):
        raise invalid("missing_required_parameter", "A file part has either 'file_data' or 'file_id'.", place)
    name = "file_data" if file.file_id is None else "file_id"
    param = f"{place}.{name}"
    source = parse_url(
        file.file_data or file.file_id or "",
        param,
        allow_urls=service.config.fetches_urls,
        is_document=True,
    )
    try:
        pages = ALL if file.pages is None else PageRange.parse(file.pages)
    except ValueError as error:
        raise invalid("invalid_value", f"Invalid value for 'pages': {error}.", f"{place}.pages") from None
    return ImageRef(source, file.detail, param, pages)


async def resolve(
    service: Service, caller: Caller, refs: Sequence[ImageRef]
) -> dict[str, list[bytes] | list[str]]:
    """By `param`: bytes of stored and fetched images, base64 of inline ones, pages of documents.

    Raises ApiError of the first part that fails, in the order of the request.
    """
    loads = [asyncio.ensure_future(_load(service, caller, ref)) for ref in refs]
    try:
        payloads = [await load for load in loads]
    finally:
        await end_tasks(*loads)
    loaded: dict[str, list[bytes] | list[str]] = {}
    left = service.config.max_images_per_request - sum(ref.pages is None for ref in refs)
    for ref, payload in zip(refs, payloads, strict=True):
        if ref.pages is None:
            loaded[ref.param] = [payload]  # type: ignore[assignment]
            continue
        data = await decoded(service, payload, ref.param)
        try:
            pages = await service.documents.split(data, ref.pages, most=left)
        except ImageError as error:
            raise from_code(error.code, error.message, ref.param) from None
        left -= len(pages)
        loaded[ref.param] = pages
    return loaded


async def decoded(service: Service, payload: bytes | str, param: str) -> bytes:
    if isinstance(payload, bytes):
        return payload
    return await asyncio.get_running_loop().run_in_executor(service.parsers, decode_base64, payload, param)


async def _load(service: Service, caller: Caller, ref: ImageRef) -> bytes | str:
    max_bytes = service.pipeline.limits.max_bytes
    match ref.source:
        case Inline(base64=text):
            check_base64_size(text, max_bytes, ref.param)
            return text
        case Stored(image_id=image_id):
            return await service.images.read(caller.namespace, image_id, ref.param)
        case Uploaded(file_id=file_id):
            return await asyncio.to_thread(_read_file, service, caller, file_id, max_bytes, ref.param)
        case Remote(url=url):
            return await service.fetcher.fetch(url, max_bytes, ref.param)


def _read_file(service: Service, caller: Caller, file_id: str, max_bytes: int, param: str) -> bytes:
    """Raises ApiError 404 for a file that isn't there, and 400 for one that is no image to be shown."""
    purpose = service.files.get(caller.namespace, file_id).purpose
    if purpose not in _IMAGE_PURPOSES:
        raise invalid(
            "invalid_value", f"The file's purpose is {purpose}; it must be vision or user_data.", param
        )
    path, found = service.files.locate(caller.namespace, file_id)
    if found.st_size > max_bytes:
        raise invalid("image_too_large", f"The file has more than {max_bytes} bytes.", param)
    return path.read_bytes()
