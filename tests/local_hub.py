"""A model hub on this machine: the parts of the hub's protocol that downloads use, and its faults.

GET /api/models/ORG/NAME[/revision/REV], HEAD and GET /ORG/NAME/resolve/REV/FILE with ETag, X-Repo-Commit,
X-Linked-* and ranges; 401, 403, 404 with the hub's error codes; connections that die in the middle.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Repo:
    files: dict[str, bytes]
    refs: dict[str, str] = field(default_factory=dict)  # branch or tag: commit
    gated: bool = False
    token: str = ""  # without it, the repository does not exist

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, data in sorted(self.files.items()):
            digest.update(name.encode() + hashlib.sha1(data).digest())
        return digest.hexdigest()

    def knows(self, revision: str) -> bool:
        return revision in ("main", self.commit, *self.refs)


def is_lfs(name: str) -> bool:
    return name.endswith(".safetensors")


def etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if is_lfs(name) else hashlib.sha1(data).hexdigest()


class LocalHub:
    """Faults: a body dies after `die_after[name]` bytes, once; after `hold_after[name]` it stops, once, with
    the connection open until `let_go` is set; `lies[name]` are sent for the true bytes."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.die_after: dict[str, int] = {}
        self.hold_after: dict[str, int] = {}
        self.held, self.let_go = threading.Event(), threading.Event()
        self.lies: dict[str, bytes] = {}
        self.gets: Counter[str] = Counter()
        self.ranges: list[tuple[str, str]] = []
        self.status = 0  # above 0: every answer is this one
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: object) -> None: ...

            def do_HEAD(self) -> None:
                hub._answer(self, with_body=False)

            def do_GET(self) -> None:
                hub._answer(self, with_body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[LocalHub]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.let_go.set()
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _answer(self, request: BaseHTTPRequestHandler, *, with_body: bool) -> None:
        path = request.path.partition("?")[0]
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        if self.status:
            self._send(request, self.status, b"", {}, with_body)
            return
        repo = self.repos.get(found[1]) if found else None
        shown = request.headers.get("authorization", "")
        if found is None or repo is None or (repo.token and shown != f"Bearer {repo.token}"):
            self._refuse(request, 401, "RepoNotFound", with_body)
        elif not repo.knows(found[2] or "main"):
            self._refuse(request, 404, "RevisionNotFound", with_body)
        elif api:
            self._send(request, 200, json.dumps(self._info(found[1], repo)).encode(), {}, with_body)
        elif repo.gated:
            self._refuse(request, 403, "GatedRepo", with_body)
        elif found[3] not in repo.files:
            self._refuse(request, 404, "EntryNotFound", with_body, repo.commit)
        else:
            self._file(request, repo, found[3], with_body)

    def _info(self, name: str, repo: Repo) -> dict[str, object]:
        siblings = []
        for file, data in repo.files.items():
            entry: dict[str, object] = {"rfilename": file, "size": len(data), "blobId": etag(file, data)}
            if is_lfs(file):
                entry["lfs"] = {"sha256": etag(file, data), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": []}

    def _file(self, request: BaseHTTPRequestHandler, repo: Repo, name: str, with_body: bool) -> None:
        data = repo.files[name]
        headers = {
            "ETag": f'"{etag(name, data)}"',
            "X-Repo-Commit": repo.commit,
            "X-Linked-Etag": f'"{etag(name, data)}"',
            "X-Linked-Size": str(len(data)),
            "Accept-Ranges": "bytes",
        }
        body, status = self.lies.get(name, data), 200
        wanted = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
        if with_body:
            self.gets[name] += 1
            if wanted:
                self.ranges.append((name, wanted[0]))
        if wanted:
            start, status = int(wanted[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body = body[start:]
        ends = self.hold_after.pop(name, None) if with_body else None
        holds = ends is not None
        if with_body and not holds:
            ends = self.die_after.pop(name, None)
        self._send(request, status, body, headers, with_body, ends, holds)

    def _refuse(
        self, request: BaseHTTPRequestHandler, status: int, code: str, with_body: bool, commit: str = ""
    ) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} | (
            {"X-Repo-Commit": commit} if commit else {}
        )
        self._send(request, status, b"{}", headers, with_body)

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        body: bytes,
        headers: dict[str, str],
        with_body: bool,
        ends: int | None = None,
        holds: bool = False,
    ) -> None:
        request.send_response(status)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if with_body:
            request.wfile.write(body[:ends])
        if ends is not None:
            request.wfile.flush()
            if holds:
                self.held.set()
                self.let_go.wait()
            request.close_connection = True
            request.connection.shutdown(2)


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
