"""Pages answered by a running server: what a captioning run needs of a pipeline, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from llm.request import Failed, Priority, SamplingParams
from preprocess.limits import ImageLimits
from vlm.caption.presets import PageQuestion, length_prefixed_digest
from vlm.pipeline import ChatMessage
from vlm.remote.chat_body import chat_body
from vlm.remote.remote_server import RemoteServer, ServerError
from workers.contract.streams import AnswerFailed, WholeAnswer

PATIENCE_S = 120.0  # for a server that is busy, or starts again


@dataclass(frozen=True, slots=True)
class _RemotePage:
    request_id: str
    body: dict[str, Any]


class RemoteEngineState:
    """The server waits for itself: a page's request is repeated until it is back."""

    ready: Literal[True] = True


class RemotePages:
    """`max_pixels`: of a page that the server's model takes whole; 0 leaves it to the server."""

    def __init__(self, server: RemoteServer, max_pixels: int = 0, model: str | None = None) -> None:
        self.limits = ImageLimits()
        self.engine = RemoteEngineState()
        self._server = server
        self._max_pixels = max_pixels
        self._model = model

    async def start(self) -> None:
        """Nothing: the server runs."""

    async def close(self) -> None:
        await self._server.close()

    async def describe(self, question: PageQuestion) -> tuple[PageQuestion, str, str]:
        """(the question with its order, the model's name and revision). Raises ServerError."""
        card = await self._server.model()
        revision = card["revision"] or f"{self._server.url}:{card['id']}"
        order = "image-first" if question.order == "auto" else question.order
        return replace(question, order=order), card["id"], length_prefixed_digest(revision)

    def prepare(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        params: SamplingParams,
        *,
        priority: Priority = "interactive",
    ) -> _RemotePage:
        body = chat_body(messages, params)
        if priority == "batch":
            body["service_tier"] = "batch"
        if self._max_pixels:
            body["mm_processor_kwargs"] = {"max_pixels": self._max_pixels}
        if self._model is not None:
            body["model"] = self._model
        return _RemotePage(request_id, body)

    async def answer(self, page: _RemotePage) -> WholeAnswer:
        """Raises AnswerFailed for what the page caused, ServerError for what would befall every page."""
        try:
            return await self._server.answer(page.body)
        except ServerError as error:
            if error.status is None or error.status in (401, 404, 429):
                raise
            raise AnswerFailed(Failed(page.request_id, error.code, error.message)) from None
