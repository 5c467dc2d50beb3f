"""A row of a batch as a chat request, through the chat route's own parts: it means what a request means."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any

from vlm.api.batches.batch_rows import RowResult, error_result, new_request_id
from vlm.api.chat.completion import completion
from vlm.api.chat.generate import admit
from vlm.api.guard.auth import Caller
from vlm.api.service import Service
from vlm.requests.errors import INTERNAL, ApiError, invalid
from vlm.requests.params import parsed_chat
from workers.contract.faults import BUSY

log = logging.getLogger(__name__)

MAX_FAULTS = 3  # of one row, before the row itself is taken to be their cause
FIRST_WAIT_S, MAX_WAIT_S = 0.2, 30.0
# no row causes these, however often it meets them
_BUSY = BUSY | {"queue_full", "images_in_flight", "deadline_unmeetable", "image_store_unavailable"}


class ChatRows:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, caller: Caller, body: dict[str, Any], deadline: float) -> RowResult:
        """Waits while the service is busy; a row that meets faults of ours again and again is given up.

        deadline: Unix seconds. Raises nothing but cancellation.
        """
        faults = 0
        wait_s = FIRST_WAIT_S
        while True:
            try:
                return await self._attempt(caller, body, deadline)
            except ApiError as error:
                faults += error.code not in _BUSY
                if error.status_code not in (429, 503) or faults >= MAX_FAULTS:
                    return error_result(error.status_code, error.code, error.message, error.param)
                hint_s = min(error.retry_after_s or 0.0, MAX_WAIT_S)
            except Exception:
                log.exception("row failed")
                return error_result(500, *INTERNAL)
            await asyncio.sleep(max(hint_s, wait_s) * random.uniform(0.8, 1.2))
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    async def _attempt(self, caller: Caller, body: dict[str, Any], deadline: float) -> RowResult:
        """Raises ApiError."""
        service = self._service
        request = await asyncio.get_running_loop().run_in_executor(service.parsers, parsed_chat, body)
        if request.stream:
            raise invalid("unsupported_parameter", "A row of a batch can't be streamed.", "stream")
        generation = await admit(service, caller, request.model_copy(update={"service_tier": "batch"}))
        generation.deadline_s = max(1.0, deadline - time.time())
        try:
            return RowResult(200, await completion(generation, "batch"), new_request_id())
        finally:
            generation.close()
