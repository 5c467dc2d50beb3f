"""Liveness, readiness, metrics, models."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from vlm import __version__
from vlm.api.guard.routes import OPEN, ServiceRoute
from vlm.api.observe.metrics import CONTENT_TYPE
from vlm.api.responses import Health, ModelCard, ModelList, VersionOut, errors
from vlm.api.service import Service, service_of
from vlm.requests.errors import unknown_model
from workers.contract.engine_client import EngineUnavailable

router = APIRouter(route_class=ServiceRoute)

_STATS_TIMEOUT_S = 1.0


@router.get("/version", openapi_extra=OPEN)
async def version() -> VersionOut:
    """Of this package."""
    return VersionOut(version=__version__)


@router.get("/ping", openapi_extra=OPEN, responses={200: {"model": Health}}, response_model=None)
@router.get("/health/live", openapi_extra=OPEN, responses={200: {"model": Health}}, response_model=None)
async def live() -> Response:
    """This process answers. Nothing else is looked at."""
    return JSONResponse({"status": "live"})


@router.get(
    "/health",
    openapi_extra=OPEN,
    responses={200: {"model": Health}, 503: {"model": Health, "description": "Not now."}},
    response_model=None,
)
@router.get(
    "/health/ready",
    openapi_extra=OPEN,
    responses={200: {"model": Health}, 503: {"model": Health, "description": "Not now."}},
    response_model=None,
)
async def ready(request: Request) -> Response:
    """New requests are taken, however busy the engine is. `/health` is what other servers call it."""
    service = service_of(request)
    if service.admission.draining:
        return JSONResponse({"status": "draining"}, 503, {"retry-after": "5"})
    if not service.pipeline.engine.ready:
        return JSONResponse({"status": "engine not ready"}, 503, {"retry-after": "2"})
    return JSONResponse({"status": "ready"})


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus text."},
        **errors(401),
    },
)
async def metrics(request: Request) -> Response:
    service = service_of(request)
    with contextlib.suppress(EngineUnavailable, TimeoutError):
        async with asyncio.timeout(_STATS_TIMEOUT_S):
            service.metrics.engine.stats = await service.pipeline.stats()
    waiting = service.admission.num_waiting()
    service.metrics.waiting.set(waiting)
    service.metrics.running.set(service.admission.num_active - waiting)
    service.metrics.decoded_bytes.set(service.admission.decoded_bytes)
    service.metrics.body_bytes.set(service.body_bytes)
    service.metrics.engine_ready.set(service.pipeline.engine.ready)
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


def _card(service: Service) -> ModelCard:
    spec = service.pipeline.spec
    return ModelCard(
        id=service.model_name,
        created=service.started_at,
        owned_by="vlm",
        context_length=spec.context_length,
        revision=spec.revision,
        tokens_per_tile=spec.geometry.tokens_per_tile or None,
    )


@router.get("/v1/models", responses=errors(401))
async def models(request: Request) -> ModelList:
    return ModelList(data=[_card(service_of(request))])


@router.get("/v1/models/{model}", responses=errors(400, 401, 404))
async def model(model: str, request: Request) -> ModelCard:
    service = service_of(request)
    if model != service.model_name:
        raise unknown_model(service.model_name)
    return _card(service)
