"""What the routes share, made once by `vlm.api.app.create_app`."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

from fastapi import Request

from vlm.api.guard.admission import Admission
from vlm.api.guard.auth import Caller, KeyRing
from vlm.api.guard.quotas import Kind, Quotas
from vlm.api.observe.metrics import Metrics
from vlm.api.observe.stage_rates import StageRates
from vlm.api.observe.tracing import NoTraces, Traces
from vlm.api.openai_responses.response_store import ResponseStore
from vlm.api.storage.fetch import Fetcher
from vlm.api.storage.files import FileStore
from vlm.api.storage.image_store import Images
from vlm.config import ServeConfig
from vlm.embedding.embedder import Embedder
from vlm.pipeline import Pipeline
from vlm.requests.documents import DocumentPages


@dataclass
class Service:
    pipeline: Pipeline
    config: ServeConfig
    keys: KeyRing
    admission: Admission
    metrics: Metrics
    images: Images
    files: FileStore
    stored: ResponseStore
    fetcher: Fetcher
    documents: DocumentPages
    started_at: int  # Unix time
    embedder: Embedder | None = None
    embedding: int = 0  # inputs of /v1/embeddings under way
    rates: StageRates = field(default_factory=StageRates)
    quotas: Quotas = field(default_factory=Quotas)
    traces: Traces = field(default_factory=NoTraces)
    body_bytes: int = 0  # of all requests under way
    start_error: BaseException | None = None  # why the pipeline did not start
    # Bodies are parsed here: two at a time, so that many large ones can't crowd the event loop out.
    parsers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="parse")
    )

    @property
    def model_name(self) -> str:
        return self.config.model_name or self.pipeline.spec.name

    def limits(self, caller: Caller) -> dict[Kind, int]:
        """A minute; 0 is off. The key's own setting wins over the server's."""
        key = self.keys.named(caller.name)
        limits: dict[Kind, int] = {
            "requests": self.config.requests_per_minute,
            "tokens": self.config.tokens_per_minute,
        }
        if key is not None and key.requests_per_minute >= 0:
            limits["requests"] = key.requests_per_minute
        if key is not None and key.tokens_per_minute >= 0:
            limits["tokens"] = key.tokens_per_minute
        return limits

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token of the model adds more bytes than this to a text."""
        return max(1, *(len(token) for token in self.pipeline.spec.tokenizer.vocabulary()))

    @property
    def fingerprint(self) -> str:
        spec = self.pipeline.spec
        return "fp_" + hashlib.sha256(f"{spec.name}:{spec.revision}".encode()).hexdigest()[:12]


def service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


def caller_of(request: Request) -> Caller:
    return cast(Caller, request.state.caller)
