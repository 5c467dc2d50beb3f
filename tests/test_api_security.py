"""What strangers may not do: wrong keys, other callers' things, oversized inputs, texts that leak."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_client import FakeEngine, LiveServer, ask, live_server, png
from fastapi.routing import APIRoute

from vlm.api.guard.auth import KeyRing, check_exposure
from vlm.api.guard.keys import ApiKey, read_keys
from vlm.api.guard.quotas import Quotas
from vlm.config import ServeConfig, SettingsError
from vlm.requests.errors import ApiError

CHAT = "/v1/chat/completions"
KEYS = KeyRing(
    ApiKey(name, hashlib.sha256(f"key-{name}".encode()).hexdigest(), name) for name in ("anna", "ben")
)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-{name}"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    config = ServeConfig(data_dir=str(tmp_path_factory.mktemp("data")))
    with live_server(config=config, keys=KEYS) as running:
        yield running


# Keys


def all_routes(app: Any) -> list[tuple[str, str]]:
    """(method, path) of everything that answers, from the routers themselves."""
    found: set[tuple[str, str]] = set()

    def walk(routes: Any) -> None:
        for route in routes:
            if isinstance(route, APIRoute):
                found.update((method, route.path) for method in route.methods)
            elif hasattr(route, "original_router"):
                walk(route.original_router.routes)
            else:
                raise AssertionError(f"a route outside the rule: {route}")

    walk(app.routes)
    return sorted(found)


OPEN_PATHS = {"/", "/static/{name}", "/health", "/health/live", "/health/ready", "/ping", "/version"}


def test_every_route_asks_for_a_key_but_the_named_few(locked: LiveServer) -> None:
    """Advisory auth bypass: default deny, found by walking the routes and not a list."""
    routes = all_routes(locked.app)
    assert len(routes) > 15 and {path for _, path in routes} >= OPEN_PATHS
    with locked.client() as http:
        for method, path in routes:
            status = http.request(method, path.replace("{", "").replace("}", "")).status_code
            if path in OPEN_PATHS:
                assert status != 401, path
            else:
                assert status == 401, (method, path)


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models",
        "/v1/models/",
        "/V1/models",
        "/./v1/models",
        "/v1/../v1/models",
        "/v1%2Fmodels",
        "/x/../metrics",
    ],
)
def test_spellings_of_a_path_open_nothing(locked: LiveServer, path: str) -> None:
    """Advisory auth bypass."""
    host, port = locked.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split(b" ")[1] in (b"401", b"404", b"307"), answer[:200]
    assert b"vlm-default" not in answer


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer key-carl",
        "Basic key-anna",
        "key-anna",
        "Bearer key-anna x",
        "Bearer é",
    ],
)
def test_bad_keys_are_refused_before_the_body_is_read(locked: LiveServer, header: str) -> None:
    with locked.client() as http:
        answered = http.post(CHAT, json=ask("Hi"), headers={"authorization": header.encode()})  # type: ignore[dict-item]
    assert answered.status_code == 401
    assert answered.json()["error"]["code"] == "invalid_api_key"
    assert answered.headers["www-authenticate"] == "Bearer" and answered.headers["x-request-id"]


def test_a_right_key_passes_and_its_namespace_travels(locked: LiveServer) -> None:
    """Advisory cache probing: equal prompts of other namespaces share no prefix."""
    with locked.client() as http:
        for name in ("anna", "ben"):
            usage = http.post(CHAT, json=ask("A shared secret"), headers=bearer(name)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            assert locked.engine.submitted[-1].namespace == name


def test_an_image_has_visual_tokens_of_each_namespace_and_one_set_within_it(locked: LiveServer) -> None:
    """Advisory cache probing: nobody can time whether another caller sent the same image."""
    body = ask(png(40, 30), "What?")
    keys = {}
    with locked.client() as http:
        for name in ("anna", "ben", "anna"):
            assert http.post(CHAT, json=body, headers=bearer(name)).status_code == 200
            keys.setdefault(name, set()).add(locked.engine.submitted[-1].prompt.spans[0].key)
    assert len(keys["anna"]) == len(keys["ben"]) == 1 and keys["anna"] != keys["ben"]


def test_stored_images_and_files_belong_to_their_caller(locked: LiveServer) -> None:
    """C4 and cross-key ids: someone else's id looks like none at all."""
    with locked.client() as http:
        image = http.post("/v1/images", files={"file": png(33, 44)}, headers=bearer("anna")).json()["id"]
        file = http.post(
            "/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}, headers=bearer("anna")
        ).json()["id"]
        body = ask({"type": "image_url", "image_url": {"url": image}}, "What?")
        assert http.post(CHAT, json=body, headers=bearer("anna")).status_code == 200
        foreign = http.post(CHAT, json=body, headers=bearer("ben"))
        assert foreign.status_code == 404 and foreign.json()["error"]["code"] == "image_not_found"
        for method, path in (
            ("GET", f"/v1/images/{image}"),
            ("DELETE", f"/v1/images/{image}"),
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("DELETE", f"/v1/files/{file}"),
        ):
            assert http.request(method, path, headers=bearer("ben")).status_code == 404, path
        assert http.get("/v1/files", headers=bearer("ben")).json()["data"] == []
        same = http.post("/v1/images", files={"file": png(33, 44)}, headers=bearer("ben")).json()["id"]
        assert same != image
        assert http.delete(f"/v1/images/{image}", headers=bearer("anna")).json()["deleted"] is True


def test_keys_file_is_checked(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"k").hexdigest()
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\nname = "a"\nsha256 = "{digest}"\nrequests_per_minute = 5\n')
    (key,) = read_keys(path)
    assert key == ApiKey("a", digest, "a", 5)
    assert KeyRing([key]).authenticate({"authorization": "Bearer k"}).namespace == "a"
    for wrong in (
        "",
        "keys = 3",
        "[[keys]]\nname = 'a'\n",
        f"[[keys]]\nname = 'a'\nsha256 = '{digest}'\nadmin = true\n",
        "[[keys]]\nname = 'a'\nsha256 = 'plain-text-key'\n",
        f"[[keys]]\nname = 'a b'\nsha256 = '{digest}'\n",
        f"[[keys]]\nname = 'a'\nsha256 = '{digest}'\n[[keys]]\nname = 'a'\nsha256 = '{'0' * 64}'\n",
    ):
        path.write_text(wrong)
        with pytest.raises(SettingsError):
            read_keys(path)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_no_start_on_a_public_address_without_keys(host: str) -> None:
    with pytest.raises(SettingsError, match="no keys"):
        check_exposure(ServeConfig(host=host), KeyRing())
    check_exposure(ServeConfig(host=host), KEYS)
    check_exposure(ServeConfig(host=host, allow_public=True), KeyRing())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "127.3.4.5"])
def test_loopback_needs_no_keys(host: str) -> None:
    check_exposure(ServeConfig(host=host), KeyRing())


def test_rate_limit_tells_when_the_next_request_may_come() -> None:
    now = [0.0]
    limiter = Quotas(lambda: now[0])
    for _ in range(3):
        limiter.take_request("a", 3)
    with pytest.raises(ApiError) as caught:
        limiter.take_request("a", 3)
    assert caught.value.status_code == 429 and caught.value.retry_after_s == pytest.approx(20)
    limiter.take_request("b", 3)
    now[0] = 20.1
    limiter.take_request("a", 3)
    limiter.take_request("c", 0)


def test_a_quiet_hour_saves_up_no_more_than_a_minutes_requests() -> None:
    now = [0.0]
    limiter = Quotas(lambda: now[0])
    limiter.take_request("a", 3)
    for quiet_s in (3600.0, 60.0, 1e9):
        now[0] += quiet_s
        for _ in range(3):
            limiter.take_request("a", 3)
        with pytest.raises(ApiError):
            limiter.take_request("a", 3)


def test_rate_limit_over_http() -> None:
    ring = KeyRing([ApiKey("a", hashlib.sha256(b"k").hexdigest(), "a", 2)])
    with live_server(keys=ring) as running, running.client(headers={"authorization": "Bearer k"}) as http:
        statuses = [http.post(CHAT, json=ask("Hi")).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert http.get("/v1/models").status_code == 200


# Oversized and odd inputs


def test_header_caps() -> None:
    """Advisory CVE-2025-48956: huge headers."""
    with live_server() as running, running.client() as http:
        many = http.get("/v1/models", headers=[(f"x-{i}", "a") for i in range(150)])
        assert many.status_code == 431 and many.json()["error"]["code"] == "too_many_headers"
        huge = http.get("/v1/models", headers={"x-huge": "a" * 300_000})
        assert huge.status_code == 400 and huge.json()["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe", b'{"messages": NaN}',
        b'{"messages": []}',
        b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "tool", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": ["x"]}]}',
        b'{"messages": [{"role": "user", "content": 3}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"[" * 100_000, b'{"a":' * 50_000,
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)  # fmt: skip
def test_malformed_bodies_are_400(locked: LiveServer, body: bytes) -> None:
    with locked.client() as http:
        headers = bearer("anna") | {"content-type": "application/json"}
        answered = http.post(CHAT, content=body, headers=headers)
    assert answered.status_code == 400, answered.text
    error = answered.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["code"]


def test_error_texts_tell_nothing_of_the_inside() -> None:
    """D8: no reprs, no paths, no tracebacks, on any route and any failure."""
    engine = FakeEngine()

    async def explode(request: Any) -> Any:
        raise RuntimeError("<_io.BytesIO object at 0x7f00> /usr/lib/python3/secret.py")
        yield

    with live_server(engine) as running, running.client() as http:
        engine_submit, engine.submit = engine.submit, explode  # type: ignore[method-assign]
        answers = [http.post(CHAT, json=ask("Hi")), http.post(CHAT, json=ask("Hi", stream=True))]
        assert [answered.status_code for answered in answers] == [500, 500]
        assert all(answered.json()["error"]["code"] == "internal_error" for answered in answers)
        engine.submit = engine_submit  # type: ignore[method-assign]
        for data in (
            b"GIF89a\0",
            b"\xff\xd8\xff\xe0junk",
            b"II*\0\x08\0\0\0\xff\xff",
            b"RIFF0000WEBPVP8 ",
            b"BM" + b"\0" * 60,
        ):
            answers += [
                http.post(CHAT, json=ask(data, "What?")),
                http.post("/v1/images", files={"file": data}),
                http.post("/v1/tokenize", json=ask(data, "What?")),
            ]
        answers += [
            http.get("/v1/files/file-x"),
            http.get("/v1/images/..%2f..%2fetc"),
            http.patch("/v1/models"),
        ]
        answers += [http.post("/v1/images", content=b"x"), http.post("/v1/files", content=b"x")]
        for answered in answers:
            assert answered.status_code >= 400
            text = json.dumps(answered.json())
            for leak in ("object at 0x", "/usr", "/lib", ".py", "Traceback", "Error(", "BytesIO", "PIL"):
                assert leak not in text, text
            assert answered.headers["x-request-id"]


def test_request_id_is_kept_when_sane_and_replaced_when_not(locked: LiveServer) -> None:
    with locked.client() as http:
        assert (
            http.get("/health/live", headers={"x-request-id": "abc-1.2_X"}).headers["x-request-id"]
            == "abc-1.2_X"
        )
        for odd in ("a" * 65, "a b", "<x>"):
            assert http.get("/health/live", headers={"x-request-id": odd}).headers["x-request-id"] != odd


def test_no_cross_origin_requests_by_default() -> None:
    origin_header = {"origin": "https://elsewhere.test"}
    with live_server() as running, running.client() as http:
        assert "access-control-allow-origin" not in http.get("/v1/models", headers=origin_header).headers
    config = ServeConfig(cors_origins="https://elsewhere.test")
    with live_server(config=config) as running, running.client() as http:
        allowed = http.get("/v1/models", headers=origin_header).headers["access-control-allow-origin"]
        assert allowed == "https://elsewhere.test"
        assert (
            "access-control-allow-origin"
            not in http.get("/v1/models", headers={"origin": "https://x"}).headers
        )


def test_playground_allows_no_foreign_code(locked: LiveServer) -> None:
    with locked.client() as http:
        policy = http.get("/").headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert http.get("/static/..%2fapp.py").status_code == 404
        assert http.get("/static/app.py").status_code == 404


def test_client_headers_reach_no_log_and_no_error(
    locked: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), locked.client() as http:
        http.get("/v1/models", headers=bearer("anna"))
        http.get("/v1/models", headers={"authorization": "Bearer wrong-secret"})
    assert "key-anna" not in caplog.text and "wrong-secret" not in caplog.text


def test_official_client_does_not_retry_a_bad_image(locked: LiveServer) -> None:
    """users.md API facts: a bad image must not cost three runs."""
    with httpx.Client(base_url=locked.url, trust_env=False) as http:
        answered = http.post(CHAT, json=ask(b"not an image", "What?"), headers=bearer("anna"))
    assert answered.status_code == 400 and answered.headers["x-should-retry"] == "false"
