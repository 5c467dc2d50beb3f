"""Questions to a running server over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from vlm.library.answers import Answer, Ask, Cost, Image, VlmError
from vlm.pipeline import ChatMessage, ImageInput
from vlm.remote.chat_body import chat_body


class AsyncClient:
    """A server of this project at `url`; with `key` where it asks for one.

    ask, stream, caption and cost raise `VlmError` for what the server refuses or can't do, and
    `httpx.TransportError` where it can't be reached.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", key: str | None = None, *, timeout_s: float = 600.0
    ) -> None:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=timeout_s)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, images: Image | Sequence[Image], question: str, **settings: Any) -> Answer:
        """`settings`: system, detail, max_tokens, temperature, seed, schema."""
        return await self._answer(Ask.of(images, question, **settings))

    async def caption(self, image: Image, preset: str = "caption", **settings: Any) -> Answer:
        """`preset`: caption, text, summary or fields."""
        return await self._answer(Ask.of(image, None, preset=preset, **settings))

    async def stream(
        self, images: Image | Sequence[Image], question: str, **settings: Any
    ) -> AsyncIterator[str]:
        """Pieces of the answer as they are written."""
        body = {**_body(Ask.of(images, question, **settings)), "stream": True}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                await response.aread()
                raise _error(response)
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not line.startswith("data: ") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise VlmError(event["error"]["code"], event["error"]["message"])
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece

    async def cost(self, images: Image | Sequence[Image], question: str = "", **settings: Any) -> Cost:
        """From the headers; nothing is decoded."""
        body = _body(Ask.of(images, question or None, **settings))
        found = await self._post("/v1/estimate", {"messages": body["messages"], "max_tokens": 1})
        tiles = sum(image["tiles"] for image in found["images"])
        return Cost(found["prompt_tokens"], found["image_tokens"], tiles, found["kv_bytes"])

    async def _answer(self, ask: Ask) -> Answer:
        found = await self._post("/v1/chat/completions", _body(ask))
        (choice,), usage = found["choices"], found["usage"]
        details = usage["prompt_tokens_details"]
        return Answer(
            choice["message"]["content"],
            choice["finish_reason"],
            usage["prompt_tokens"],
            details["image_tokens"],
            details["cached_tokens"],
            usage["completion_tokens"],
        )

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.post(path, json=body)
        if response.is_error:
            raise _error(response)
        found: dict[str, Any] = response.json()
        return found


def _body(ask: Ask) -> dict[str, Any]:
    images = (ImageInput(data, ask.detail) for data in ask.images)
    system = [] if ask.system is None else [ChatMessage("system", (ask.system,))]
    asked = ChatMessage("user", (*images, ask.question.prompt))
    return chat_body([*system, asked], ask.question.params)


def _error(response: httpx.Response) -> VlmError:
    try:
        error = response.json()["error"]
        return VlmError(str(error["code"]), str(error["message"]))
    except (ValueError, KeyError, TypeError):
        return VlmError("unknown", f"The server answered with status {response.status_code}.")
