"""The path of one request. Read this file first.

image bytes -> header probe -> tile grid -> prompt      `prepare`: pure arithmetic, the cost is known
prompt -> engine -> events                              `run`: a cached image or prefix is jumped over;
engine wants an image -> decode, tile -> engine         only then are its pixels decoded, once for all
                                                        requests that wait for it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llm.request import (
    Event,
    Failed,
    Finished,
    Priority,
    Prompt,
    Request,
    RequestError,
    SamplingParams,
    Timings,
    VisualKey,
    WantVisual,
)
from preprocess.limits import ImageLimits
from preprocess.own_size import AreaResize, EdgeResize
from preprocess.stage import PreprocessSpec
from preprocess.types import Detail, ImageError, ImageInfo, TileGrid
from vlm.foreign.foreign_spec import ForeignSpec
from vlm.headers import read_header
from vlm.prompt import PLAIN, ImagePart, Message, Rendering
from vlm.spec import ModelSpec
from vlm.tools.calls import Call
from workers.contract.engine_client import EngineClient, EngineUnavailable
from workers.contract.stages import (
    MAX_ATTEMPTS,
    PreprocessStage,
    Queued,
    StageUnavailable,
    Urgency,
    unreachable,
)
from workers.contract.streams import WholeAnswer, gather
from workers.contract.tiles_handle import TilesLost

log = logging.getLogger(__name__)

PREPROCESSING_FAULT = "The image could not be processed because of a fault on our side. Please try again."


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image as a client sent it."""

    data: bytes
    detail: Detail = "auto"
    max_pixels: int | None = None  # below the model's own cap, where the image is taken whole


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """calls: of an answer; call_id and name: of the call that a message of role "tool" answers."""

    role: str
    content: tuple[str | ImageInput, ...]
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Chat:
    """What a prompt is made from."""

    messages: tuple[ChatMessage, ...]
    rendering: Rendering


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """An image whose cost is known; nothing was decoded."""

    data: bytes
    info: ImageInfo
    grid: TileGrid
    spec: PreprocessSpec
    key: VisualKey
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    request: Request
    images: tuple[PlannedImage, ...]
    started: float  # time.monotonic() when preparation began
    places: tuple[str, ...] = ()  # where the images stand in a client's request, in their order

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt


@dataclass(frozen=True, slots=True)
class ImageFailed(Failed):
    """The pixels of the request's image number `image` (from 0) could not be had."""

    image: int = field(kw_only=True)


@dataclass(slots=True)
class _Flight:
    """One preparation of an image's tiles, and the requests that wait for it."""

    task: asyncio.Task[None] | None = None
    elapsed_ms: float = 0.0
    failed: bool = False
    waiters: set[str] = field(default_factory=set)
    urgency: Urgency = field(default_factory=lambda: Urgency("batch"))  # until an interactive request joins


class Pipeline:
    def __init__(
        self,
        spec: ModelSpec | ForeignSpec,
        preprocess: PreprocessStage,
        engine: EngineClient,
        limits: ImageLimits | None = None,
        image_deadline_s: float = 60.0,
        sends_chats: bool = False,
    ) -> None:
        """sends_chats: the engine is given the messages beside their prompt."""
        self.spec = spec
        self.preprocess = preprocess
        self.engine = engine
        self.limits = limits or ImageLimits()
        self.image_deadline_s = image_deadline_s
        self._sends_chats = sends_chats
        self._flights: dict[VisualKey, _Flight] = {}

    async def start(self) -> None:
        await asyncio.gather(self.engine.start(), self.preprocess.start())

    async def close(self) -> None:
        for flight in list(self._flights.values()):
            if flight.task:
                flight.task.cancel()
        await asyncio.gather(self.engine.close(), self.preprocess.close())

    def plan_image(self, image: ImageInput, namespace: str = "", num_images: int = 1) -> PlannedImage:
        """What an image costs in a chat of so many, from its header. Raises `ImageError`."""
        info = read_header(image.data, self.limits)
        spec = self.spec.preprocess_spec(image.detail, num_images)
        if image.max_pixels is not None:
            spec = _capped(spec, image.max_pixels)
        grid = spec.rule.grid(info.width, info.height, spec.detail)
        return PlannedImage(
            data=image.data,
            info=info,
            grid=grid,
            spec=spec,
            key=self.spec.visual_key(info.sha256, spec, namespace),
            num_tokens=self.spec.geometry.rows(grid),
        )

    def prepare(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        *,
        priority: Priority = "interactive",
        namespace: str = "",
        rendering: Rendering = PLAIN,
    ) -> PreparedRequest:
        """The exact prompt and its cost; nothing is decoded. Raises `ImageError` and `RequestError`."""
        started = time.monotonic()
        images: list[PlannedImage] = []
        planned: list[Message] = []
        num_images = sum(not isinstance(part, str) for message in messages for part in message.content)
        for message in messages:
            parts: list[str | ImagePart] = []
            for part in message.content:
                if isinstance(part, str):
                    parts.append(part)
                else:
                    images.append(self.plan_image(part, namespace, num_images))
                    parts.append(ImagePart(images[-1].grid, images[-1].key))
            planned.append(Message(message.role, tuple(parts), message.calls, message.call_id, message.name))
        prompt = self.spec.prompt_builder.build(planned, rendering)
        # an answer that is gone on with has its spaces where they are
        params = replace(self._fit(prompt, params), drop_leading_space=not rendering.continues_last)
        chat = Chat(tuple(messages), rendering) if self._sends_chats else None
        request = Request(request_id, prompt, params, priority, namespace, chat)
        return PreparedRequest(request, tuple(images), started)

    def prepare_text(
        self,
        request_id: str,
        text: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: Priority = "interactive",
        namespace: str = "",
    ) -> PreparedRequest:
        """A text or its tokens to go on with, without images. Raises `RequestError`."""
        started = time.monotonic()
        prompt = self.spec.prompt_builder.plain(text)
        request = Request(request_id, prompt, self._fit(prompt, params), priority, namespace)
        return PreparedRequest(request, (), started)

    def _fit(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """Caps `max_tokens` at what the context leaves. Raises `RequestError` when nothing is left."""
        room = self.spec.context_length - prompt.num_tokens
        if room < 1:
            text = prompt.num_tokens - prompt.num_image_tokens
            raise RequestError(
                "context_length_exceeded",
                f"This model's maximum context length is {self.spec.context_length} tokens. Your messages "
                f"have {prompt.num_tokens} tokens ({text} of text, {prompt.num_image_tokens} of images), "
                "which leaves no room for an answer.",
                "messages",
            )
        return replace(params, max_tokens=min(params.max_tokens, room))

    async def stats(self) -> dict[str, Any]:
        """The engine's, with the queue to preprocess workers. Raises EngineUnavailable."""
        stats = await self.engine.stats()
        if "queues" not in stats and isinstance(self.preprocess, Queued):
            stats = {**stats, "queues": await self.preprocess.queues()}
        return stats

    async def run(self, prepared: PreparedRequest) -> AsyncGenerator[Event, None]:
        """The answer's events. Closing the iterator cancels whatever is still under way."""
        images = {image.key: image for image in prepared.images}
        request_id = prepared.request.id
        joined: dict[VisualKey, _Flight] = {}
        submitted = time.monotonic()
        try:
            async with contextlib.aclosing(self.engine.submit(prepared.request)) as events:
                async for event in events:
                    match event:
                        case WantVisual(key=key):
                            joined[key] = self._join_flight(images[key], prepared.request)
                        case Finished(timings=timings) if timings:
                            outside_ms = (submitted - prepared.started) * 1e3
                            yield replace(
                                event, timings=_from_request_read(timings, outside_ms, joined.values())
                            )
                        case Failed():
                            yield _blamed(event, prepared, joined)
                        case _:
                            yield event
        finally:
            self._leave_flights(request_id)

    async def answer(self, prepared: PreparedRequest) -> WholeAnswer:
        """Waits for the whole answer. Raises `AnswerFailed` and `EngineUnavailable`."""
        return await gather(self.run(prepared))

    def _join_flight(self, image: PlannedImage, request: Request) -> _Flight:
        """Single flight: the tiles of an image are made once, however many requests wait for them."""
        flight = self._flights.get(image.key)
        if flight is None:
            flight = self._flights[image.key] = _Flight()
        if request.priority == "interactive":
            flight.urgency.priority = "interactive"
        if flight.task is None:
            flight.task = asyncio.create_task(self._make_tiles(image, flight))
        flight.waiters.add(request.id)
        return flight

    def _leave_flights(self, request_id: str) -> None:
        for key, flight in list(self._flights.items()):
            flight.waiters.discard(request_id)
            if not flight.waiters and flight.task:
                self._flights.pop(key)
                flight.task.cancel()

    async def _make_tiles(self, image: PlannedImage, flight: _Flight) -> None:
        """Decodes and tiles an image and hands it to the engine; a failure is reported to the engine."""
        started = time.monotonic()
        try:
            for _ in range(MAX_ATTEMPTS):
                tiles = await self.preprocess.tiles(
                    image.data,
                    image.info,
                    image.spec,
                    self.limits,
                    deadline_s=self.image_deadline_s,
                    urgency=flight.urgency,
                )
                flight.elapsed_ms = (time.monotonic() - started) * 1e3
                with contextlib.closing(tiles), contextlib.suppress(TilesLost):
                    return await self.engine.put_tiles(image.key, tiles)
            raise unreachable()
        except (ImageError, StageUnavailable) as error:
            await self._fail_flight(image.key, flight, error.code, error.message)
        except EngineUnavailable:
            pass  # the engine's death already ended every stream that waited
        except Exception:
            log.exception("preprocessing failed")
            await self._fail_flight(image.key, flight, "internal_error", PREPROCESSING_FAULT)
        finally:
            self._end_flight(image.key, flight)

    async def _fail_flight(self, key: VisualKey, flight: _Flight, code: str, message: str) -> None:
        """The flight ends before its failure is reported: later requests for the image get another."""
        flight.failed = True
        self._end_flight(key, flight)
        with contextlib.suppress(EngineUnavailable):
            await self.engine.fail_tiles(key, code, message)

    def _end_flight(self, key: VisualKey, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            self._flights.pop(key)


def _from_request_read(timings: Timings, outside_ms: float, joined: Iterable[_Flight]) -> Timings:
    """Timings on the client's clock, which starts when its request is read; the engine's at submission.

    The engine's `encode_ms` runs from the wish for an image to its visual tokens, tiles included.
    """
    preprocess_ms = sum(flight.elapsed_ms for flight in joined)
    return replace(
        timings,
        preprocess_ms=outside_ms + preprocess_ms,
        encode_ms=max(0.0, timings.encode_ms - preprocess_ms),
        ttft_ms=timings.ttft_ms + outside_ms,
        total_ms=timings.total_ms + outside_ms,
    )


def _blamed(event: Failed, prepared: PreparedRequest, joined: Mapping[VisualKey, _Flight]) -> Failed:
    """The failure with the first image whose pixels could not be had, if that is why."""
    for index, image in enumerate(prepared.images):
        if image.key in joined and joined[image.key].failed:
            return ImageFailed(event.request_id, event.code, event.message, image=index)
    return event


def _capped(spec: PreprocessSpec, max_pixels: int) -> PreprocessSpec:
    """Raises `RequestError` where images are cut into tiles."""
    if not isinstance(spec.rule, AreaResize | EdgeResize):
        raise RequestError(
            "unsupported_parameter",
            "'max_pixels' is not available: this model doesn't take images whole. Use 'detail'.",
            "mm_processor_kwargs.max_pixels",
        )
    return replace(spec, rule=spec.rule.capped(max_pixels))
