"""What a request costs, known before it runs: tiles, tokens, KV bytes, expected time to first token."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict

from fastapi import APIRouter, Request

from llm.request import SamplingParams
from preprocess.types import TileGrid
from vlm.api.chat.convert import prepare
from vlm.api.chat.generate import rendering
from vlm.api.guard.routes import ServiceRoute
from vlm.api.responses import (
    BODY,
    Detokenized,
    Estimate,
    ExpectedTtft,
    GridOut,
    ImageCost,
    TokenCount,
    TokenIds,
    errors,
)
from vlm.api.service import Service, caller_of, service_of
from vlm.pipeline import PlannedImage, PreparedRequest
from vlm.requests.errors import invalid
from vlm.requests.params import check_model, check_supported, parsed_chat, sampling_params
from vlm.requests.schemas import (
    ChatRequest,
    DetokenizeRequest,
    PlainTokenizeRequest,
    TokenizeRequest,
)

router = APIRouter(route_class=ServiceRoute)


def grid_out(grid: TileGrid) -> GridOut:
    return GridOut(**asdict(grid))


def image_cost(service: Service, image: PlannedImage) -> ImageCost:
    return ImageCost(
        width=image.info.width,
        height=image.info.height,
        tiles=image.grid.num_tiles,
        image_tokens=image.num_tokens,
        prompt_tokens=service.pipeline.spec.image_prompt_tokens(image.grid),
        grid=grid_out(image.grid),
    )


def _costs(service: Service, prepared: PreparedRequest) -> list[ImageCost]:
    return [image_cost(service, image) for image in prepared.images]


@router.post("/v1/tokenize", responses=errors(*BODY, 404))
async def tokenize(body: TokenizeRequest, request: Request) -> TokenCount:
    """The true prompt of a chat, images expanded; or a text's tokens."""
    service = service_of(request)
    check_model(body.model, service.model_name)
    if (body.messages is None) == (body.text is None):
        raise invalid("invalid_value", "Give either messages or a text.", "messages")
    if body.messages is None:
        text = body.text or ""
        ids = await asyncio.get_running_loop().run_in_executor(
            service.parsers, lambda: service.pipeline.spec.tokenizer.encode(text, allow_special=False)
        )
        return TokenCount(
            prompt_tokens=len(ids), image_tokens=0, text_tokens=len(ids), images=[], token_ids=ids
        )
    chat = parsed_chat(body.model_dump(exclude={"text"}, exclude_unset=True, by_alias=True))
    prepared = await _prepared(request, chat, 1)
    prompt = prepared.prompt
    return TokenCount(
        prompt_tokens=prompt.num_tokens,
        image_tokens=prompt.num_image_tokens,
        text_tokens=prompt.num_tokens - prompt.num_image_tokens,
        images=_costs(service, prepared),
        token_ids=list(prompt.token_ids),
    )


@router.post("/tokenize", responses=errors(*BODY, 404))
async def plain_tokenize(body: PlainTokenizeRequest, request: Request) -> TokenIds:
    """`/v1/tokenize` in the form of vLLM and llama.cpp."""
    text = body.content if body.prompt is None else body.prompt
    given = body.model_dump(exclude={"prompt", "content"}, exclude_unset=True, by_alias=True)
    counted = await tokenize(TokenizeRequest.model_validate({**given, "text": text}), request)
    ids = counted.token_ids or []
    return TokenIds(
        tokens=ids, count=len(ids), max_model_len=service_of(request).pipeline.spec.context_length
    )


@router.post("/detokenize", responses=errors(*BODY, 404))
async def detokenize(body: DetokenizeRequest, request: Request) -> Detokenized:
    """Special tokens are written out."""
    service = service_of(request)
    check_model(body.model, service.model_name)
    tokenizer = service.pipeline.spec.tokenizer
    if any(token >= service.pipeline.spec.vocab_size for token in body.tokens):
        raise invalid("invalid_value", "A token id is outside the vocabulary.", "tokens")
    text = await asyncio.get_running_loop().run_in_executor(
        service.parsers, lambda: tokenizer.decode(body.tokens, skip_special=False)
    )
    return Detokenized(prompt=text, content=text)


@router.post("/v1/estimate", responses=errors(*BODY, 404))
async def estimate(body: ChatRequest, request: Request) -> Estimate:
    """Of a chat as it would be asked; nothing is decoded or run. `warm` is the time when all images and all
    text before the last message's text are cached."""
    service = service_of(request)
    check_model(body.model, service.model_name)
    prepared = await _prepared(request, body, sampling_params(body, service.config).max_tokens)
    prompt = prepared.prompt
    unique = {image.key: image for image in prepared.images}.values()
    megapixels = sum(image.info.width * image.info.height for image in unique) / 1e6
    after_images = prompt.num_tokens - max((s.start + s.length for s in prompt.spans), default=0)
    max_tokens = prepared.request.params.max_tokens
    return Estimate(
        prompt_tokens=prompt.num_tokens,
        image_tokens=prompt.num_image_tokens,
        text_tokens=prompt.num_tokens - prompt.num_image_tokens,
        max_completion_tokens=max_tokens,
        kv_bytes=service.pipeline.spec.kv_bytes(prompt.num_tokens + max_tokens),
        images=_costs(service, prepared),
        expected_ttft_ms=ExpectedTtft(
            cold=service.rates.expected_ttft_ms(
                megapixels, sum(image.num_tokens for image in unique), prompt.num_tokens
            ),
            warm=service.rates.expected_ttft_ms(0, 0, after_images),
        ),
    )


async def _prepared(request: Request, chat: ChatRequest, max_tokens: int) -> PreparedRequest:
    """Raises ApiError."""
    check_supported(chat)
    media = chat.mm_processor_kwargs
    return await prepare(
        service_of(request),
        caller_of(request),
        f"cost-{uuid.uuid4().hex}",
        chat.messages,
        SamplingParams(max_tokens=max_tokens),
        rendering=rendering(chat),
        max_pixels=media.max_pixels if media else None,
    )
