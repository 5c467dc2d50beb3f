"""Small HTTP servers for tests: any handler on a free port, and a proxy as nginx and its like are."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "host")


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port."""
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield running.server_port
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


@contextlib.contextmanager
def prefix_proxy(upstream: str, prefix: str, *, strips: bool) -> Iterator[str]:
    """Shows `upstream` under a path, at the address given; outside it is a 404. Answers stream through."""
    host = urlsplit(upstream).netloc

    class Handler(BaseHTTPRequestHandler):
        def _forward(self) -> None:
            if not self.path.startswith(f"{prefix}/") and (strips or self.path != prefix):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
            behind = http.client.HTTPConnection(host, timeout=30)
            path = self.path.removeprefix(prefix) if strips else self.path
            behind.request(self.command, path, body, {**headers, "host": self.headers["host"]})
            answer = behind.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP_BY_HOP:
                    self.send_header(name, value)
            self.end_headers()
            while piece := answer.read1(1 << 16):
                self.wfile.write(piece)
            behind.close()

        do_GET = do_POST = do_DELETE = _forward

        def log_message(self, format: str, *args: Any) -> None:
            return

    with serving(Handler) as port:
        yield f"http://127.0.0.1:{port}"
