"""Structured logs with the id of the request that was being served: one JSON object a line, or text."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
import time
from typing import Any, Literal

Form = Literal["auto", "json", "plain"]

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Of the request that is being served."""
access: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("access", default=None)
"""What the access log says of it, beside route and status: filled while it is served."""

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _OWN}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        line.update(_extras(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = {"request_id": request_id.get() or None, **_extras(record)}
        text = " ".join(f"{key}={value}" for key, value in fields.items() if value is not None)
        return f"{super().format(record)} {text}".rstrip()


def note(**fields: Any) -> None:
    """Adds fields to the request's line in the access log; does nothing outside a request."""
    line = access.get()
    if line is not None:
        line.update(fields)


def formatter(form: Form) -> logging.Formatter:
    """`auto`: plain where stderr is a terminal, else JSON."""
    plain = form == "plain" or (form == "auto" and sys.stderr.isatty())
    return PlainFormatter() if plain else JsonFormatter()


def configure(form: Form) -> None:
    """Everything to stderr: stdout belongs to commands' results."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("uvicorn.error", "uvicorn.access", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
