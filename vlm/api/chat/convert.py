"""A chat as a client sent it -> the pipeline's messages: checked, resolved, then decoded off the event loop.

Counts are checked before anything is fetched or decoded, and over the whole chat, history included.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llm.request import Priority, RequestError, SamplingParams
from preprocess.limits import check_request
from preprocess.types import ImageError
from vlm.api.chat.parts import ImageRef, read_part, resolve
from vlm.api.guard.auth import Caller
from vlm.api.service import Service
from vlm.pipeline import ChatMessage, ImageInput, PreparedRequest
from vlm.prompt import PLAIN, Rendering
from vlm.requests.errors import from_code, from_exception, invalid
from vlm.requests.media import decode_base64
from vlm.requests.schemas import ChatMessageIn
from vlm.requests.tool_params import answered_call, calls_of
from vlm.tools.calls import Call


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
            parsed = read_part(service, part, f"{place}.content[{j}]")
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


async def prepare(
    service: Service,
    caller: Caller,
    request_id: str,
    messages: Sequence[ChatMessageIn],
    params: SamplingParams,
    priority: Priority = "interactive",
    rendering: Rendering = PLAIN,
    salt: str = "",
    max_pixels: int | None = None,
) -> PreparedRequest:
    """Header probe, tiling rule, prompt: the exact cost, with nothing decoded. Raises ApiError.

    salt: requests of other salts share no cached work; max_pixels: of each image that is taken whole.
    """
    namespace = _namespace(caller, salt)
    drafts = draft(service, messages)
    payloads = await resolve(service, caller, [part for part in _parts(drafts) if isinstance(part, ImageRef)])

    def build() -> PreparedRequest:
        images: list[tuple[str, ImageInput]] = []
        inputs: dict[str, list[ImageInput]] = {}
        for part in _parts(drafts):
            if isinstance(part, ImageRef):
                data = [_data(payload, part.param) for payload in payloads[part.param]]
                inputs[part.param] = [ImageInput(page, part.detail, max_pixels) for page in data]
                images += [(part.param, image) for image in inputs[part.param]]
        chat = [
            ChatMessage(
                message.role,
                tuple(
                    content
                    for part in message.content
                    for content in ((part,) if isinstance(part, str) else inputs[part.param])
                ),
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
                namespace=namespace,
                rendering=rendering,
            )
        except ImageError:
            _blame(service, images)
            raise
        check_request((image.info for image in prepared.images), service.pipeline.limits)
        return replace(prepared, places=tuple(place for place, _ in images))

    try:
        return await asyncio.get_running_loop().run_in_executor(service.parsers, build)
    except Exception as error:
        raise from_exception(error) from None


async def prepare_text(
    service: Service,
    caller: Caller,
    request_id: str,
    prompt: str | list[int],
    params: SamplingParams,
    priority: Priority,
    salt: str = "",
) -> PreparedRequest:
    """A prompt as it is, without a chat's template. Raises ApiError."""

    def build() -> PreparedRequest:
        if isinstance(prompt, str):
            _check_text(service, [DraftMessage("user", (prompt,))], ())
        return service.pipeline.prepare_text(
            request_id, prompt, params, priority=priority, namespace=_namespace(caller, salt)
        )

    try:
        return await asyncio.get_running_loop().run_in_executor(service.parsers, build)
    except RequestError as error:
        param = "prompt" if error.param in (None, "messages") else error.param
        raise from_code(error.code, error.message, param) from None


def _namespace(caller: Caller, salt: str) -> str:
    if not salt:
        return caller.namespace
    return f"{caller.namespace}/{hashlib.sha256(salt.encode(errors='surrogatepass')).hexdigest()[:32]}"


def _parts(drafts: Sequence[DraftMessage]) -> Iterator[str | ImageRef]:
    return (part for message in drafts for part in message.content)


def _check_text(service: Service, drafts: Sequence[DraftMessage], images: Sequence[ImageInput]) -> None:
    """Refuses, before it is tokenised, a text that no tokenisation makes fit. Raises RequestError."""
    num_bytes = sum(len(part.encode(errors="replace")) for part in _parts(drafts) if isinstance(part, str))
    context = service.pipeline.spec.context_length
    text_tokens = -(-num_bytes // service.longest_token_bytes)
    if text_tokens < context:
        return
    planned = (service.pipeline.plan_image(image, num_images=len(images)) for image in images)
    image_tokens = sum(image.num_tokens for image in planned)
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
