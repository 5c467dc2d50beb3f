"""/v1/batches: create, get, list, cancel."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from vlm.api.batches.batch_chat import ChatRows
from vlm.api.batches.batch_runner import BatchRunner
from vlm.api.batches.batch_store import BatchJob, BatchStore, Status
from vlm.api.guard.routes import ServiceRoute
from vlm.api.responses import BODY, ApiModel, errors
from vlm.api.service import Service, caller_of, service_of
from vlm.api.storage.files import default_data_dir
from vlm.requests.errors import ApiError, invalid
from vlm.requests.schemas import Lenient

ENDPOINTS = ("/v1/chat/completions",)
WINDOWS_S = {"24h": 86_400}

router = APIRouter(route_class=ServiceRoute)

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class BatchRequest(Lenient):
    input_file_id: str = Field(max_length=64, description="A file of purpose batch, one request a line.")
    endpoint: str = Field(max_length=128, description=f"One of: {', '.join(ENDPOINTS)}.")
    completion_window: str = Field(max_length=16, description=f"One of: {', '.join(WINDOWS_S)}.")
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)


class BatchError(ApiModel):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(ApiModel):
    object: str
    data: list[BatchError]


class RequestCounts(ApiModel):
    total: int
    completed: int
    failed: int


class BatchOut(ApiModel):
    id: str
    object: str
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(ApiModel):
    object: str
    data: list[BatchOut]
    first_id: str | None
    last_id: str | None
    has_more: bool


def batch_json(batch: BatchJob) -> dict[str, Any]:
    """What clients see; the batch's namespace and our own bookkeeping stay inside."""
    found = [asdict(error) for error in batch.errors]
    values: dict[str, Any] = {
        "object": "batch",
        "errors": {"object": "list", "data": found} if found else None,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
    }
    same = BatchOut.model_fields.keys() - values.keys()
    return values | {name: getattr(batch, name) for name in same}


def make_runner(service: Service) -> BatchRunner:
    data_dir = Path(service.config.data_dir) if service.config.data_dir else default_data_dir()
    return BatchRunner(BatchStore(data_dir), service.files, ChatRows(service))


@contextlib.asynccontextmanager
async def batches_running(app: FastAPI, service: Service) -> AsyncIterator[None]:
    """For the app's lifespan, while the pipeline is up."""
    runner = app.state.batches = make_runner(service)
    await runner.start()
    try:
        yield
    finally:
        await runner.close()


def _runner(request: Request) -> BatchRunner:
    return cast(BatchRunner, request.app.state.batches)


@router.post(
    "/v1/batches",
    response_model=None,
    responses={200: {"model": BatchOut}, **errors(*BODY, 404)},
)
async def create_batch(body: BatchRequest, request: Request) -> JSONResponse:
    """Runs the requests of a file; rows are written as they are done, in no particular order."""
    runner, service, caller = _runner(request), service_of(request), caller_of(request)
    if body.endpoint not in ENDPOINTS:
        raise invalid("invalid_value", f"'endpoint' must be one of {', '.join(ENDPOINTS)}.", "endpoint")
    if body.completion_window not in WINDOWS_S:
        raise invalid(
            "invalid_value",
            f"'completion_window' must be one of {', '.join(WINDOWS_S)}.",
            "completion_window",
        )
    if not await runner.take_lock():
        raise ApiError(
            503, "batches_unavailable", "Another process runs the batches of this server.", retry_after_s=2
        )

    def create() -> BatchJob:
        stored = service.files.get(caller.namespace, body.input_file_id)
        if stored.purpose != "batch":
            raise invalid("invalid_value", "The file's purpose is not batch.", "input_file_id")
        return runner.store.create(
            caller.namespace,
            caller.name,
            endpoint=body.endpoint,
            input_file_id=stored.id,
            input_path=service.files.path(caller.namespace, stored.id),
            window=body.completion_window,
            window_s=WINDOWS_S[body.completion_window],
            metadata=body.metadata,
        )

    batch = await asyncio.to_thread(create)
    runner.add(batch)
    return JSONResponse(batch_json(batch))


@router.get(
    "/v1/batches", response_model=None, responses={200: {"model": BatchList}, **errors(400, 401, 431)}
)
async def list_batches(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=64)] = None,
) -> JSONResponse:
    """The caller's batches, newest first."""
    runner = _runner(request)
    found = await asyncio.to_thread(runner.store.newest_first, caller_of(request).namespace)
    if after is not None:
        ids = [batch.id for batch in found]
        if after not in ids:
            raise invalid("invalid_value", "'after' is not the id of a batch.", "after")
        found = found[ids.index(after) + 1 :]
    page = [batch_json(await runner.current(batch)) for batch in found[:limit]]
    return JSONResponse(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(found) > limit,
        }
    )


@router.get(
    "/v1/batches/{batch_id}",
    response_model=None,
    responses={200: {"model": BatchOut}, **errors(400, 401, 404, 431)},
)
async def get_batch(batch_id: str, request: Request) -> JSONResponse:
    """A batch as it is now."""
    return JSONResponse(batch_json(await _current(request, batch_id)))


@router.post(
    "/v1/batches/{batch_id}/cancel",
    response_model=None,
    responses={200: {"model": BatchOut}, **errors(400, 401, 404, 408, 409, 413, 415, 429, 431)},
)
async def cancel_batch(batch_id: str, request: Request) -> JSONResponse:
    """Ends a batch early; rows that are done are kept. Cancelling twice is fine."""
    batch = await _current(request, batch_id)
    if batch.status in ("completed", "failed", "expired"):
        raise ApiError(409, "batch_ended", "This batch has ended already.")
    if batch.status != "cancelled":
        batch = await _runner(request).cancel(batch)
    return JSONResponse(batch_json(batch))


async def _current(request: Request, batch_id: str) -> BatchJob:
    runner = _runner(request)
    batch = await asyncio.to_thread(runner.store.get, caller_of(request).namespace, batch_id)
    return await runner.current(batch)
