"""What a request costs, known before it runs: tiles, tokens, KV bytes, expected time to first token."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict

from fastapi import APIRouter, Request

from llm.request import SamplingParams
from preprocess.types import TileGrid
from vlm.api.chat.convert import prepare
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
from vlm.requests.params import check_model
from vlm.requests.schemas import (
    DetokenizeRequest,
    EstimateRequest,
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
    prepared = await prepare(
        service, caller_of(request), _throwaway_id(), body.messages, SamplingParams(max_tokens=1)
    )
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
    counted = await tokenize(TokenizeRequest(model=body.model, messages=body.messages, text=text), request)
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
async def estimate(body: EstimateRequest, request: Request) -> Estimate:
    """Nothing is decoded or run. `warm` is the time when all images and all text before the last
    message's text are cached."""
    service = service_of(request)
    check_model(body.model, service.model_name)
    wanted = body.max_completion_tokens or body.max_tokens or service.config.default_max_tokens
    prepared = await prepare(
        service, caller_of(request), _throwaway_id(), body.messages, SamplingParams(max_tokens=wanted)
    )
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


def _throwaway_id() -> str:
    return f"cost-{uuid.uuid4().hex}"
