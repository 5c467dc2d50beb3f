"""A small reverse proxy that shows a server under a path, as nginx and its like do."""

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
def prefix_proxy(upstream: str, prefix: str, *, strips: bool) -> Iterator[str]:
    """The proxy's own address; what lies outside the prefix is a 404 of its own. Answers stream through."""
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

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
