"""Runs the service: uvicorn with our caps, and a shutdown that lets running answers end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import ssl
import threading
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from preprocess.process_memory import keep_what_is_loaded
from vlm.api.app import create_app
from vlm.api.guard.auth import KeyRing, check_exposure
from vlm.api.guard.keys import load_keys
from vlm.api.guard.tls import load_certificate, tls_context
from vlm.api.observe.logs import configure
from vlm.api.service import Service
from vlm.config import ServeConfig, SettingsError
from vlm.pipeline import Pipeline
from vlm.requests.errors import error_body
from workers.children.process_limits import allow_descriptors

log = logging.getLogger("vlm.server")

MAX_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 20.0  # from the connection, or a later request's first byte, to the end of its headers
KEEP_ALIVE_S = 75
CLOSE_S = 5  # for responses to reach their readers once all work has ended


class CappedH11(H11Protocol):
    """Caps the time until each request's headers have come, however they trickle, and answers what isn't HTTP
    in our error shape."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            self._await_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:  # the next one was in the buffer
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        body = json.dumps(error_body(400, "invalid_http", "This is not a valid HTTP request.")).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-should-retry", b"false"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class DrainingServer(uvicorn.Server):
    """First signal: refuse new work, let running answers end within `drain_s`. Second: end at once."""

    def __init__(self, config: uvicorn.Config, service: Service, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._service = service
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._draining: asyncio.Task[None] | None = None
        self._signals = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            return
        self._reload_at_hangup()
        keep_what_is_loaded()
        for server in self.servers:
            for bound in server.sockets:
                host, port = bound.getsockname()[:2]
                scheme = "http" if self._tls is None else "https"
                log.info("listening", extra={"address": f"{scheme}://{host}:{port}"})

    def _reload_at_hangup(self) -> None:
        """SIGHUP reads keys and certificates again; where the terminal was closed, it ends the server as
        SIGTERM does."""
        if threading.current_thread() is not threading.main_thread():
            return
        on_terminal = os.isatty(0)

        def hangup() -> None:
            if on_terminal and not os.isatty(0):
                self.handle_exit(signal.SIGHUP, None)
            else:
                self.reload()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hangup)

    def reload(self) -> None:
        """Keys and certificates as their files are now, for new requests and connections; if one can't be
        used it is logged, and the old ones stay."""
        service = self._service
        try:
            keys = load_keys(service.config.keys_file, os.environ)
            check_exposure(service.config, KeyRing(keys))
            if self._tls is not None:
                load_certificate(self._tls, service.config)
            service.keys.replace(keys)
        except SettingsError as error:
            log.error("nothing was reloaded", extra={"reason": str(error)})
        else:
            log.info("reloaded", extra={"keys": len(service.keys), "tls": self._tls is not None})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._loop is None or not self.started:
            self.should_exit = self.force_exit = True
            if self._loop is not None and self._main is not None:
                self._loop.call_soon_threadsafe(self._main.cancel)
        elif self._signals > 1:
            self.should_exit = self.force_exit = True
        else:
            self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._draining = asyncio.create_task(self.drain())

    async def drain(self) -> None:
        admission = self._service.admission
        admission.draining = True
        log.info("draining", extra={"active": admission.num_active})
        try:
            if not await admission.drained(self._service.config.drain_s):
                log.warning("ending what still runs", extra={"active": admission.num_active})
                await self._service.pipeline.engine.close()
                await admission.drained(CLOSE_S)
        except Exception:
            log.exception("draining failed")
        self.should_exit = True


def make_server(app: FastAPI, config: ServeConfig) -> DrainingServer:
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        http=CappedH11,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    tls = tls_context(config)
    if tls is not None:
        settings.load()
        settings.ssl = tls
    return DrainingServer(settings, cast(Service, app.state.service), tls)


def bind(host: str, port: int) -> socket.socket:
    """Before the engine starts, so that a taken port costs no time. Raises SettingsError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise SettingsError(f"can't listen on {host}:{port}: {error.strerror}") from None
    return bound


def run(pipeline: Pipeline, config: ServeConfig) -> None:
    """Serves until it is asked to stop.

    Raises SettingsError for settings and addresses that can't be used, and whatever kept the pipeline from
    starting.
    """
    configure(config.log_format)
    allow_descriptors()
    app = create_app(pipeline, config)
    service = cast(Service, app.state.service)
    check_exposure(config, service.keys)
    listener = bind(config.host.strip("[]"), config.port)
    server = make_server(app, config)
    # a failed start is raised below, and one that was called off is no error: no traceback of uvicorn's
    logging.getLogger("uvicorn.error").addFilter(lambda record: service.start_error is None)
    try:
        server.run(sockets=[listener])
    except (asyncio.CancelledError, KeyboardInterrupt):
        return
    except SystemExit:  # uvicorn's way to say that the app did not start
        if service.start_error is None:
            raise
    finally:
        listener.close()
    if isinstance(service.start_error, Exception):
        raise service.start_error
