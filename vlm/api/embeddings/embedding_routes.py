"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from preprocess.types import ImageError
from vlm.api.chat.parts import ImageRef, decoded, read_part, resolve
from vlm.api.chat.streaming import until_disconnect
from vlm.api.guard.routes import ServiceRoute
from vlm.api.observe.logs import note
from vlm.api.responses import BODY, EmbeddingList, errors
from vlm.api.service import Service, caller_of, service_of
from vlm.embedding.embedder import Embedder
from vlm.headers import read_header
from vlm.requests.errors import ApiError, from_code, invalid
from vlm.requests.params import check_model
from vlm.requests.schemas import EmbeddingRequest
from workers.contract.stages import StageUnavailable

router = APIRouter(route_class=ServiceRoute)
MOST_WAITING = 1024  # inputs of all requests under way


@router.post(
    "/v1/embeddings",
    response_model=None,
    responses={200: {"model": EmbeddingList, "description": "A vector of each input."}, **errors(*BODY, 404)},
)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Unit vectors of texts and images, in one space."""
    service = service_of(request)
    try:
        return JSONResponse(await until_disconnect(request, _embed(service, request, body)))
    except ApiError as error:
        service.metrics.errors.labels(error.code).inc()
        raise


async def _embed(service: Service, request: Request, body: EmbeddingRequest) -> dict[str, Any]:
    embedder, caller = service.embedder, caller_of(request)
    if embedder is None:
        raise invalid(
            "no_embedder",
            "This server has no embedder. It is started with --embedder open_clip:NAME@PRETRAINED, or "
            "open_clip:local-dir:FOLDER.",
            "model",
        )
    check_model(body.model, embedder.name)
    inputs = _inputs(service, body)
    limit = service.limits(caller)["tokens"]
    service.quotas.check_tokens(caller.name, limit)
    if service.embedding + len(inputs) > MOST_WAITING:
        raise ApiError(429, "queue_full", "Too many inputs wait to be embedded.")
    service.embedding += len(inputs)
    try:
        refs = {index: item for index, item in enumerate(inputs) if isinstance(item, ImageRef)}
        texts = {index: item for index, item in enumerate(inputs) if isinstance(item, str)}
        loaded = await resolve(service, caller, list(refs.values()))
        pixels = [await _pixels(service, embedder, loaded[ref.param][0], ref.param) for ref in refs.values()]
        vectors: dict[int, np.ndarray] = {}
        num_tokens = 0
        if pixels:
            vectors |= zip(refs, await embedder.images(pixels), strict=True)
        if texts:
            found, num_tokens = await embedder.texts(list(texts.values()))
            vectors |= zip(texts, found, strict=True)
    finally:
        service.embedding -= len(inputs)
    service.quotas.spend_tokens(caller.name, limit, num_tokens)
    note(prompt_tokens=num_tokens)
    in_base64 = body.encoding_format == "base64"
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _shown(vectors[index], in_base64)}
            for index in range(len(inputs))
        ],
        "model": embedder.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _inputs(service: Service, body: EmbeddingRequest) -> Sequence[str | ImageRef]:
    """Raises ApiError 400."""
    given = [body.input] if isinstance(body.input, str) else body.input
    found: list[str | ImageRef] = []
    for index, item in enumerate(given):
        place = f"input[{index}]"
        read = item if isinstance(item, str) else read_part(service, item, place)
        if isinstance(read, ImageRef) and read.pages is not None:
            raise invalid("unsupported_content_part", "An input is a text or an image.", f"{place}.type")
        if isinstance(read, str) and not read:
            raise invalid("invalid_value", "The text is empty.", place)
        found.append(read)
    most = service.config.max_images_per_request
    if sum(isinstance(item, ImageRef) for item in found) > most:
        raise invalid("too_many_images", f"At most {most} images are accepted.", "input")
    return found


async def _pixels(service: Service, embedder: Embedder, payload: bytes | str, param: str) -> np.ndarray:
    """Uint8 [side, side, 3], decoded where chats' images are. Raises ApiError."""
    limits = service.pipeline.limits
    data = await decoded(service, payload, param)
    try:
        info = await asyncio.get_running_loop().run_in_executor(service.parsers, read_header, data, limits)
        tiles = await service.pipeline.preprocess.tiles(
            data, info, embedder.preprocess, limits, deadline_s=service.config.image_deadline_s
        )
        with contextlib.closing(tiles):
            pixels: np.ndarray = tiles.open().pixels[0].copy()
            return pixels
    except (ImageError, StageUnavailable) as error:
        raise from_code(error.code, error.message, param) from None


def _shown(vector: np.ndarray, in_base64: bool) -> str | list[float]:
    if not in_base64:
        return [float(number) for number in vector]
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
