"""What operators rely on: settings from anywhere, keys that change without a restart, quotas, HTTPS, logs."""

from __future__ import annotations

import asyncio
import configparser
import hashlib
import json
import logging
import re
import shutil
import signal
import ssl
import subprocess
import tomllib
from dataclasses import fields
from pathlib import Path

import httpx
import pytest
from fake_engine_client import FakeEngine, ask, live_server, make_pipeline
from live_serve import vlm_serve
from test_api_lifecycle import Stoppable
from test_settings import started
from waiting import wait_for

from vlm.api.app import create_app
from vlm.api.guard.auth import KeyRing
from vlm.api.guard.keys import ENVIRONMENT, ApiKey, load_keys
from vlm.api.guard.quotas import RATE_LIMIT_HEADERS, Quotas
from vlm.api.observe.metrics import described
from vlm.api.server import make_server
from vlm.cli.main import app
from vlm.cli.serve_command import merged, shown
from vlm.config import EngineOptions, ServeConfig, SettingsError
from vlm.requests.errors import ApiError

CHAT = "/v1/chat/completions"
DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def write_keys(path: Path, *keys: str, **settings: int) -> Path:
    more = "".join(f"{name} = {value}\n" for name, value in settings.items())
    path.write_text("".join(f'[[keys]]\nname = "{key}"\nsha256 = "{digest(key)}"\n{more}' for key in keys))
    return path


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    places = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *places],
        check=True,
        capture_output=True,
    )
    return cert, key


# Settings


def test_the_environment_wins_over_the_file_and_options_over_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vlm.toml"
    file.write_text("[serve]\nport = 1000\nmax_queued = 3\nallow_urls = true\n[engine]\nthreads = 2\n")
    variables = {"VLM_PORT": "2000", "VLM_MAX_QUEUED": "4", "VLM_THREADS": "3", "VLM_ALLOW_URLS": "false"}
    config, engine = started(monkeypatch, "--config", str(file), "--port", "3000", **variables)
    assert (config.port, config.max_queued, config.allow_urls, engine.threads) == (3000, 4, False, 3)


@pytest.mark.parametrize(
    ("variable", "value"), [("VLM_PORT", "99999"), ("VLM_THREADS", "two"), ("VLM_TRACES", "maybe")]
)
def test_a_wrong_variable_is_refused_by_the_settings_name(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"^the environment: {variable[4:].lower()} must be"):
        merged(None, {}, {variable: value})


def test_the_address_of_a_kubernetes_service_named_vlm_is_not_a_port() -> None:
    config, _ = merged(None, {}, {"VLM_PORT": "tcp://10.0.0.7:8000"})
    assert config.value.port == ServeConfig().port


def test_printed_settings_make_the_same_server_and_hold_no_password(tmp_path: Path) -> None:
    given = {"port": 9, "broker": "redis://me:secret@host:1/0"}
    config, engine = merged(None, given, {"VLM_THREADS": "2"})
    text = f"{shown(config)}\n{shown(engine)}"
    tables = tomllib.loads(text)
    assert ServeConfig(**tables["serve"]).broker == "redis://host:1/0" and "secret" not in text
    assert EngineOptions(**tables["engine"]) == engine.value
    assert set(tables["serve"]) == {field.name for field in fields(ServeConfig)}
    assert "port = 9  # the command line" in text and "threads = 2  # the environment" in text


# Keys


def test_keys_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.toml", "from-file")
    ring = KeyRing(load_keys(str(file), {ENVIRONMENT: "first-secret, second-secret,"}))
    assert len(ring) == 3
    one, two = (ring.authenticate({"authorization": f"Bearer {key}-secret"}) for key in ("first", "second"))
    assert one.name != two.name and one.namespace == two.namespace == "environment"
    for wrong in ({ENVIRONMENT: "short"}, {ENVIRONMENT: "from-file"}):
        with pytest.raises(SettingsError):
            load_keys(str(file), wrong)


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key", "X-API-Key"])
def test_a_key_is_taken_where_clients_put_it(header: str) -> None:
    value = "Bearer secret-key" if header == "authorization" else "secret-key"
    with live_server(keys=KeyRing([ApiKey("a", digest("secret-key"), "a")])) as running:
        with running.client(headers={header: value}) as http:
            assert http.get("/v1/models").status_code == 200
        with running.client(headers={header: value + "x"}) as http:
            assert http.get("/v1/models").status_code == 401


def test_reloading_changes_keys_for_new_requests_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_keys(tmp_path / "keys.toml", "old")
    config = ServeConfig(keys_file=str(file), data_dir=str(tmp_path / "data"), port=0)
    app = create_app(make_pipeline(FakeEngine()), config)
    server, service = make_server(app, config), app.state.service

    def passes(key: str) -> bool:
        try:
            return service.keys.authenticate({"x-api-key": key}).name == key
        except ApiError:
            return False

    write_keys(file, "new")
    server.reload()
    assert passes("new") and not passes("old")
    file.write_text("[[keys]\n")
    server.reload()
    assert passes("new") and "nothing was reloaded" in caplog.text


def test_tokens_are_limited_by_what_answers_used() -> None:
    now = [0.0]
    quotas = Quotas(lambda: now[0])
    quotas.check_tokens("a", 60)
    quotas.spend_tokens("a", 60, 150)  # one answer may overdraw
    with pytest.raises(ApiError) as refused:
        quotas.check_tokens("a", 60)
    assert refused.value.status_code == 429 and refused.value.retry_after_s == pytest.approx(91)
    quotas.check_tokens("b", 60)
    now[0] = 91.0
    quotas.check_tokens("a", 60)


def test_limits_are_shown_in_headers_and_a_spent_quota_is_a_429() -> None:
    ring = KeyRing([ApiKey("a", digest("secret-key"), "a", requests_per_minute=50, tokens_per_minute=5)])
    with live_server(keys=ring) as running, running.client(headers={"x-api-key": "secret-key"}) as http:
        first = http.post(CHAT, json=ask("Hi"))
        assert first.headers["x-ratelimit-limit-requests"] == "50"
        assert first.headers["x-ratelimit-remaining-requests"] == "49"
        assert set(RATE_LIMIT_HEADERS) <= set(first.headers)
        used = first.json()["usage"]
        assert used["total_tokens"] > 5
        second = http.post(CHAT, json=ask("Hi"))
        assert second.status_code == 429 and "5 tokens a minute" in second.json()["error"]["message"]
        assert float(second.headers["retry-after"]) > 0
        assert second.headers["x-ratelimit-remaining-tokens"] == "0"
        assert http.get("/v1/models").status_code == 200
        assert f'vlm_caller_tokens_total{{caller="a",kind="prompt"}} {float(used["prompt_tokens"])}' in (
            http.get("/metrics").text
        )


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log_names_caller_and_tokens(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vlm.api")
    ring = KeyRing([ApiKey("reports", digest("secret-key"), "a")])
    with live_server(keys=ring) as running, running.client(headers={"x-api-key": "secret-key"}) as http:
        assert http.post(CHAT, json={**ask("Hi"), "stream": stream}).status_code == 200
        wait_for(lambda: any(record.message == "request" for record in caplog.records))
    (line,) = [vars(record) for record in caplog.records if record.message == "request"]
    assert line["caller"] == "reports" and line["prompt_tokens"] > 0 and line["completion_tokens"] > 0


# HTTPS


def test_certificates_that_do_not_work_are_refused_in_one_line(tmp_path: Path) -> None:
    cert, _ = certificate(tmp_path, "one")
    _, other = certificate(tmp_path, "other")
    for wrong in (
        {"tls_certfile": str(cert), "tls_keyfile": str(other)},
        {"tls_certfile": str(tmp_path / "none.pem")},
        {"tls_keyfile": str(other)},
    ):
        config = ServeConfig(data_dir=str(tmp_path / "data"), **wrong)
        with pytest.raises(SettingsError, match="tls_certfile") as refused:
            make_server(create_app(make_pipeline(FakeEngine()), config), config)
        assert "\n" not in str(refused.value)


def status(url: str, trusted: Path) -> int:
    context = ssl.create_default_context(cafile=str(trusted))
    with httpx.Client(verify=context, trust_env=False, timeout=30) as http:
        return http.get(f"{url}/health/live").status_code


def test_https_serves_and_a_renewed_certificate_is_taken_without_a_restart(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "one")
    renewed, renewed_key = certificate(tmp_path, "renewed")
    running = Stoppable(
        FakeEngine(),
        ServeConfig(port=0, data_dir=str(tmp_path / "data"), tls_certfile=str(cert), tls_keyfile=str(key)),
    )
    url = running.url.replace("http://", "https://")
    old = tmp_path / "old.pem"
    old.write_bytes(cert.read_bytes())
    assert status(url, old) == 200
    cert.write_bytes(renewed.read_bytes())
    key.write_bytes(renewed_key.read_bytes())
    running.server.reload()
    assert status(url, cert) == 200
    with pytest.raises(httpx.ConnectError):
        status(url, old)
    running.signal()
    running.thread.join(20)
    assert not running.thread.is_alive()


# Processes


@pytest.mark.slow
def test_hangup_under_streams_changes_keys_and_certificate_and_drops_no_answer(tmp_path: Path) -> None:
    file = write_keys(tmp_path / "keys.toml", "old-secret")
    with vlm_serve(tmp_path, keys_file=str(file)) as live:
        body = {**ask("Hi", max_tokens=120), "ignore_eos": True, "stream": True}

        async def one(http: httpx.AsyncClient, begun: asyncio.Event) -> str:
            text = ""
            headers = {"authorization": "Bearer old-secret"}
            async with http.stream("POST", CHAT, json=body, headers=headers) as answer:
                async for line in answer.aiter_lines():
                    begun.set()
                    text = line or text
            return text

        async def load() -> list[str]:
            async with live.async_client() as http:
                begun = [asyncio.Event() for _ in range(32)]
                tasks = [asyncio.create_task(one(http, event)) for event in begun]
                await begun[0].wait()
                write_keys(file, "new-secret")
                live.process.send_signal(signal.SIGHUP)
                while (await http.get("/v1/models", headers={"x-api-key": "new-secret"})).status_code != 200:
                    await asyncio.sleep(0.02)
                assert (await http.get("/v1/models", headers={"x-api-key": "old-secret"})).status_code == 401
                live.process.send_signal(signal.SIGTERM)
                return await asyncio.gather(*tasks)

        assert asyncio.run(load()) == ["data: [DONE]"] * 32
        live.process.wait(60)
    reloads = [json.loads(line) for line in live.log if '"reloaded"' in line]
    assert [line["keys"] for line in reloads] == [1]


# Files for operators


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    asked = set(re.findall(r"\bvlm_[a-z0-9_]+", json.dumps(dashboard["panels"]))) - {"vlm_serve"}
    known = {name for name, _, _ in described() if name.startswith("vlm_")}  # others say the same again
    histograms = {f"{name}_bucket" for name, kind, _ in described() if kind == "histogram"}
    assert asked <= known | histograms
    assert len(asked) > 0.8 * len(known)


def test_the_systemd_unit_is_valid_and_reloads_with_the_signal_that_reloads() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "vlm.service")
    service = unit["Service"]
    assert service["ExecReload"].endswith("-HUP $MAINPID")
    assert float(service["TimeoutStopSec"]) > ServeConfig().drain_s
    command = service["ExecStart"].split()
    assert app([*command[1:2], "--help"], standalone_mode=False) == 0
