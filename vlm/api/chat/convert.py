"""A chat as a client sent it -> the pipeline's messages: checked, resolved, then decoded off the event loop.

Counts are checked before anything is fetched or decoded, and over the whole chat, history included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from llm.request import Priority, RequestError, SamplingParams
from preprocess.limits import check_request
from preprocess.types import Detail, ImageError
from vlm.api.guard.auth import Caller
from vlm.api.service import Service
from vlm.pipeline import ChatMessage, ImageInput, PreparedRequest
from vlm.prompt import PLAIN, Rendering
from vlm.requests.errors import from_exception, invalid
from vlm.requests.media import Inline, Remote, Source, Stored, check_base64_size, decode_base64, parse_url
from vlm.requests.schemas import ChatMessageIn, ContentPart, ImageUrl
from vlm.requests.tool_params import answered_call, calls_of
from vlm.tools.calls import Call

SUPPORTED_PARTS = "Content parts are of type text or image_url."


@dataclass(frozen=True, slots=True)
class ImageRef:
    source: Source
    detail: Detail
    param: str  # messages[i].content[j].image_url.url


@dataclass(frozen=True, slots=True)
class DraftMessage:
    """calls, call_id, name: as in `vlm.pipeline.ChatMessage`."""

    role: str
    content: tuple[str | ImageRef, ...]
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None


def draft(service: Service, messages: Sequence[ChatMessageIn]) -> list[DraftMessage]:
    """Checks every part. Raises ApiError 400 with the part's place as `param`."""
    drafts: list[DraftMessage] = []
    num_images = 0
    earlier: list[Call] = []
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        role = "system" if message.role == "developer" else message.role
        calls = calls_of(message, place)
        earlier += calls
        answered = answered_call(message, earlier, place) if role == "tool" else None
        beside = (calls, answered.id, answered.name) if answered else (calls,)
        content = message.content
        if content is None or isinstance(content, str) or (role in ("assistant", "tool") and not content):
            # an answer may have been empty
            drafts.append(DraftMessage(role, (str(content or ""),), *beside))
            continue
        if not content:
            place = f"{place}.content"
            raise invalid("invalid_value", f"Invalid value for '{place}': the list of parts is empty.", place)
        parts: list[str | ImageRef] = []
        for j, part in enumerate(content):
            parsed = _part(service, part, f"{place}.content[{j}]")
            parts.append(parsed)
            num_images += isinstance(parsed, ImageRef)
            if num_images > service.config.max_images_per_request:
                raise invalid(
                    "too_many_images",
                    f"At most {service.config.max_images_per_request} images are accepted, history included.",
                    "messages",
                )
        drafts.append(DraftMessage(role, tuple(parts), *beside))
    if not any(part for message in drafts for part in message.content):
        raise invalid("invalid_value", "The messages hold no text and no image.", "messages")
    return drafts


def image_params(messages: Sequence[ChatMessageIn]) -> tuple[str, ...]:
    """Where the images of a drafted chat stand, in their order."""
    return tuple(
        f"messages[{i}].content[{j}].image_url.url"
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if part.type == "image_url"
    )


def _part(service: Service, part: ContentPart, place: str) -> str | ImageRef:
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
            source = parse_url(image.url, param, allow_urls=service.config.allow_urls)
            return ImageRef(source, image.detail, param)
        case "file" | "input_file":
            raise invalid(
                "unsupported_content_part",
                "Files are not accepted as content. Send a document's pages as images; `vlm caption` reads "
                "PDFs themselves.",
                f"{place}.type",
            )
        case _:
            raise invalid(
                "unsupported_content_part",
                f"This type of content part is not supported. {SUPPORTED_PARTS}",
                f"{place}.type",
            )


async def resolve(service: Service, caller: Caller, drafts: Sequence[DraftMessage]) -> dict[str, bytes | str]:
    """By `param`: bytes of stored and fetched images, base64 of inline ones. Raises ApiError."""
    refs = [part for message in drafts for part in message.content if isinstance(part, ImageRef)]
    payloads = await asyncio.gather(*(_load(service, caller, ref) for ref in refs))
    return {ref.param: payload for ref, payload in zip(refs, payloads, strict=True)}


async def _load(service: Service, caller: Caller, ref: ImageRef) -> bytes | str:
    max_bytes = service.pipeline.limits.max_bytes
    match ref.source:
        case Inline(base64=text):
            check_base64_size(text, max_bytes, ref.param)
            return text
        case Stored(image_id=image_id):
            return await service.images.read(caller.namespace, image_id, ref.param)
        case Remote(url=url):
            return await service.fetcher.fetch(url, max_bytes, ref.param)


async def prepare(
    service: Service,
    caller: Caller,
    request_id: str,
    messages: Sequence[ChatMessageIn],
    params: SamplingParams,
    priority: Priority = "interactive",
    rendering: Rendering = PLAIN,
) -> PreparedRequest:
    """Header probe, tiling rule, prompt: the exact cost, with nothing decoded. Raises ApiError."""
    drafts = draft(service, messages)
    payloads = await resolve(service, caller, drafts)

    def build() -> PreparedRequest:
        images = [
            (part.param, ImageInput(_data(payloads[part.param], part.param), part.detail))
            for message in drafts
            for part in message.content
            if isinstance(part, ImageRef)
        ]
        inputs = dict(images)
        chat = [
            ChatMessage(
                message.role,
                tuple(part if isinstance(part, str) else inputs[part.param] for part in message.content),
                message.calls,
                message.call_id,
                message.name,
            )
            for message in drafts
        ]
        try:
            _check_text(service, drafts, [image for _, image in images])
            prepared = service.pipeline.prepare(
                request_id,
                chat,
                params,
                priority=priority,
                namespace=caller.namespace,
                rendering=rendering,
            )
        except ImageError:
            _blame(service, images)
            raise
        check_request((image.info for image in prepared.images), service.pipeline.limits)
        return prepared

    try:
        return await asyncio.get_running_loop().run_in_executor(service.parsers, build)
    except Exception as error:
        raise from_exception(error) from None


def _check_text(service: Service, drafts: Sequence[DraftMessage], images: Sequence[ImageInput]) -> None:
    """Refuses, before it is tokenised, a text that no tokenisation makes fit. Raises RequestError."""
    num_bytes = sum(
        len(part.encode(errors="replace"))
        for message in drafts
        for part in message.content
        if isinstance(part, str)
    )
    context = service.pipeline.spec.context_length
    text_tokens = -(-num_bytes // service.longest_token_bytes)
    if text_tokens < context:
        return
    image_tokens = sum(service.pipeline.plan_image(image).num_tokens for image in images)
    raise RequestError(
        "context_length_exceeded",
        f"This model's maximum context length is {context} tokens. Your messages have at least "
        f"{text_tokens + image_tokens} tokens ({text_tokens} of text, {image_tokens} of images).",
        "messages",
    )


def _data(payload: bytes | str, param: str) -> bytes:
    return decode_base64(payload, param) if isinstance(payload, str) else payload


def _blame(service: Service, images: Sequence[tuple[str, ImageInput]]) -> None:
    """Raises the refusal of the first image that is refused, with its place."""
    for param, image in images:
        try:
            service.pipeline.plan_image(image)
        except ImageError as error:
            raise invalid(error.code, error.message, param) from None
