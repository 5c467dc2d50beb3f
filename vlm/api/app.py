"""The HTTP service: `create_app` puts the parts together."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse

from vlm.api import costs, playground
from vlm.api.anthropic import message_routes as anthropic
from vlm.api.batches import batch_routes as batches
from vlm.api.batches.batch_routes import batches_running
from vlm.api.chat import chat_routes as chat
from vlm.api.chat import render_routes as render
from vlm.api.completions import text_routes as completions
from vlm.api.embeddings import embedding_routes as embeddings
from vlm.api.guard.admission import Admission
from vlm.api.guard.auth import KeyRing
from vlm.api.guard.keys import load_keys
from vlm.api.guard.middleware import HeadMiddleware, PrefixMiddleware, ServiceMiddleware
from vlm.api.guard.quotas import RATE_LIMIT_HEADERS
from vlm.api.guard.routes import ServiceRoute
from vlm.api.observe import health
from vlm.api.observe.metrics import Metrics
from vlm.api.observe.tracing import make_traces
from vlm.api.openai_responses import response_routes as openai_responses
from vlm.api.openai_responses.response_store import ResponseStore
from vlm.api.responses import errors
from vlm.api.service import Service
from vlm.api.storage import file_routes
from vlm.api.storage import image_routes as images
from vlm.api.storage.addresses import AllowedOrigins
from vlm.api.storage.fetch import Fetcher
from vlm.api.storage.files import FileStore, default_data_dir
from vlm.api.storage.image_store import open_images
from vlm.config import MEBIBYTE, ServeConfig
from vlm.embedding.embedder import Embedder, EmbedderSource
from vlm.pipeline import Pipeline
from vlm.requests.documents import DocumentPages
from vlm.requests.errors import install_handlers

TITLE = "vlm"
DESCRIPTION = "Questions about images, answered; OpenAI-compatible."


def make_service(pipeline: Pipeline, config: ServeConfig, keys: KeyRing | None = None) -> Service:
    """Raises ConfigError for keys that can't be used."""
    if keys is None:
        keys = KeyRing(load_keys(config.keys_file, os.environ))
    return Service(
        pipeline=pipeline,
        config=config,
        keys=keys,
        admission=Admission(config),
        metrics=Metrics(),
        images=open_images(config),
        files=FileStore(
            Path(config.data_dir) if config.data_dir else default_data_dir(),
            max_file_bytes=config.max_file_mb * MEBIBYTE,
            max_total_bytes=config.max_files_mb * MEBIBYTE,
        ),
        stored=ResponseStore(config.max_responses, config.responses_mb * MEBIBYTE, config.response_ttl_s),
        fetcher=Fetcher(
            config.fetch_deadline_s,
            allowed=AllowedOrigins.of(
                config.allow_image_hosts, config.allow_image_networks, allow_urls=config.allow_urls
            ),
        ),
        documents=DocumentPages(pipeline.limits),
        traces=make_traces(config.traces),
        started_at=int(time.time()),
        embedder=Embedder(EmbedderSource.parse(config.embedder)) if config.embedder else None,
    )


def create_app(pipeline: Pipeline, config: ServeConfig, *, keys: KeyRing | None = None) -> FastAPI:
    """The pipeline is started and closed with the app. Raises ConfigError."""
    service = make_service(pipeline, config, keys)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await pipeline.start()
        except BaseException as error:
            service.start_error = error
            await pipeline.close()
            raise
        await asyncio.to_thread(service.files.sweep)
        try:
            async with batches_running(app, service):
                yield
        finally:
            service.admission.draining = True
            await pipeline.close()
            await service.documents.close()
            if service.embedder is not None:
                service.embedder.close()
            service.parsers.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title=TITLE,
        description=DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = ServiceRoute
    app.state.service = service
    app.add_middleware(ServiceMiddleware, service=service)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.strip() for origin in config.cors_origins.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # official clients send a dozen of their own, more with each release
            expose_headers=["x-request-id", "retry-after", "x-should-retry", *RATE_LIMIT_HEADERS],
            allow_private_network=True,  # a page of the internet, asking a server of this network
        )
    app.add_middleware(HeadMiddleware)
    if config.root_path:
        app.add_middleware(PrefixMiddleware, root_path=config.root_path)
    install_handlers(app)
    for module in (
        chat,
        render,
        completions,
        embeddings,
        anthropic,
        openai_responses,
        costs,
        images,
        file_routes,
        batches,
        health,
        playground,
    ):
        app.include_router(module.router)

    @app.get("/openapi.json", responses=errors(401), response_model=None)
    async def openapi_document(request: Request) -> JSONResponse:
        return JSONResponse(openapi(app))

    return app


def openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with what it can't know: bearer keys, and that no route answers 422."""
    document = get_openapi(title=TITLE, version="1", description=DESCRIPTION, routes=app.routes)
    document["components"].setdefault("securitySchemes", {})["key"] = {"type": "http", "scheme": "bearer"}
    document["security"] = [{"key": []}, {}]
    if root_path := app.state.service.config.root_path:
        document["servers"] = [{"url": root_path}]
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    return document
