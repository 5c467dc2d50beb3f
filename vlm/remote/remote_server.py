"""Requests to a running server, patient while it is busy."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import httpx

from llm.request import Timings, Usage
from workers.contract.faults import BUSY
from workers.contract.streams import AnswerChoice, WholeAnswer

KEY_VARIABLE = "VLM_API_KEY"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 15.0


class ServerError(Exception):
    """What the server refused or failed at; `status` is None where it could not be reached."""

    def __init__(self, status: int | None, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    @property
    def is_clients(self) -> bool:
        """The request's own fault, which no other try mends."""
        return self.status is not None and self.status < 500 and self.status != 429


class RemoteServer:
    """A server at `url`, with the key of the environment. `patience_s`: how long a server that is busy or
    gone is asked again."""

    def __init__(self, url: str, patience_s: float = 0.0, timeout_s: float = 600.0) -> None:
        key = os.environ.get(KEY_VARIABLE, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=timeout_s)
        self._patience_s = patience_s

    async def close(self) -> None:
        await self._http.aclose()

    async def model(self) -> dict[str, Any]:
        """What it serves, as /v1/models has it; asked once. Raises ServerError."""
        try:
            card: dict[str, Any] = (await self._try("GET", "/v1/models"))["data"][0]
            return {"id": str(card["id"]), "revision": str(card.get("revision", ""))}
        except (KeyError, IndexError, TypeError):
            raise _strange() from None

    async def answer(self, body: dict[str, Any]) -> WholeAnswer:
        """Raises ServerError."""
        found = await self._patiently("POST", "/v1/chat/completions", body)
        try:
            choices = tuple(
                AnswerChoice([choice["message"]["content"] or ""], finish_reason=choice["finish_reason"])
                for choice in found["choices"]
            )
            used = found["usage"]
            details = used.get("prompt_tokens_details") or {}
            usage = Usage(
                used["prompt_tokens"],
                details.get("image_tokens", 0),
                details.get("cached_tokens", 0),
                used["completion_tokens"],
            )
            return WholeAnswer(choices, usage, Timings(**(found.get("timings") or {})))
        except (KeyError, TypeError, AttributeError):
            raise _strange() from None

    async def _patiently(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        end = clock() + self._patience_s
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await self._try(method, path, body)
            except ServerError as error:
                passes = error.status in (None, 429) or error.code in BUSY
                if not passes or clock() + wait_s > end:
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _try(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.request(method, path, json=body)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise ServerError(400, "invalid_url", f"{self.url} is no http:// or https:// address") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerError(None, "server_unreachable", f"{self.url} can't be reached: {reason}") from None
        try:
            found = response.json()
            if not response.is_error:
                return dict(found)
            told = found["error"]
            raise ServerError(response.status_code, str(told["code"]), str(told["message"]), told["param"])
        except (ValueError, KeyError, TypeError):
            raise _strange(response.status_code) from None


def _strange(status: int = 502) -> ServerError:
    return ServerError(status, "unknown", f"the server's answer (status {status}) is not this API's")
