"""Settings of file and command line: what is given wins, what can't work is refused in one line."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import redis

from vlm.build import build_runner, engine_command
from vlm.cli import serve_command
from vlm.cli.errors import BAD_INPUT, run
from vlm.cli.main import app
from vlm.config import DEFAULT_MODEL, EngineOptions, ServeConfig, read_config
from vlm.settings import Between, SettingsError, bounds, from_mapping
from workers.cluster.redis_client import check_access
from workers.contract.engine_client import EngineRefused
from workers.local.engine_process import EngineProcess

SAMPLES = Path(DEFAULT_MODEL).parent / "samples"
CONFIGS = (ServeConfig, EngineOptions)


def numeric() -> Iterator[tuple[type, str, type]]:
    for config in CONFIGS:
        for name, kind in get_type_hints(config).items():
            if kind in (int, float):
                yield config, name, kind


@pytest.mark.parametrize(("config", "name", "kind"), numeric())
def test_every_number_has_bounds_and_its_error_names_them(config: type, name: str, kind: type) -> None:
    limit: Between = bounds(config, name)
    assert limit.low <= getattr(config(), name) <= limit.high
    wrong: list[Any] = [limit.low - 1, limit.high + 1, -1, "1", True, None, [1]]
    wrong += [math.nan, math.inf] if kind is float else [limit.low + 0.5]
    for value in wrong:
        with pytest.raises(SettingsError) as refused:
            from_mapping(config, {name: value})
        told = str(refused.value)
        assert told.startswith(f"{name} must be ") and "\n" not in told
        assert str(limit) in told or "number" in told
    for value in (limit.low, limit.high):
        assert getattr(from_mapping(config, {name: kind(value)}), name) == value


def test_all_wrong_settings_are_told_at_once_and_no_secret_with_them() -> None:
    with pytest.raises(SettingsError) as refused:
        ServeConfig(port=99999, max_queued=-1, variant="slow", broker="http://user:secret@host")  # type: ignore[arg-type]
    told = str(refused.value)
    assert all(name in told for name in ("port", "max_queued", "fast, exact", "broker"))
    assert "secret" not in told
    with pytest.raises(SettingsError, match="threads"):
        replace(EngineOptions(), threads=0)


@pytest.mark.parametrize(
    ("name", "good", "wrong"),
    [
        (
            "root_path",
            ["", "/vlm", "/a/b-c.d"],
            ["vlm", "/vlm/", "/", "//a", "/v1", "/v1/x", "/../a", "/a b", "/static", "/vlm\n"],
        ),
        (
            "cors_origins",
            ["", "*", "https://a.example", "http://localhost:1, app://x"],
            ["a.example", "https://a/", "https://a/b", "https://a b"],
        ),
        ("broker", ["", "redis://h/0", "rediss://h", "unix:///s"], ["amqp://h", "localhost:6379"]),
        ("host", ["::1", "localhost"], ["", "a b"]),
    ],
)
def test_texts_have_forms(name: str, good: list[str], wrong: list[str]) -> None:
    for value in good:
        assert getattr(ServeConfig(**{name: value}), name) == value
    for value in wrong:
        with pytest.raises(SettingsError, match=name):
            ServeConfig(**{name: value})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("serve = 5", "tables"),
        ("[serve]\nprot = 1", r"\[serve\].*unknown setting prot"),
        ("[engine]\nthreads = 0", r"\[engine\].*threads must be from 1"),
        ("[serve]\nport = 'x", "not valid TOML"),
        ("[serves]", "unknown table"),
        (b"\xff", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text: str | bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "vlm.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SettingsError, match=told) as refused:
        serve_command.merged(file, {}, {})
    assert "\n" not in str(refused.value)


FILE = """
[serve]
host = "127.0.0.2"
port = 9000
root_path = "/vlm"
broker = "redis://file/0"
store = "redis://file/1"
remote_engine = true
allow_public = true
[engine]
model = "elsewhere"
threads = 3
weights = "int8"
kv = "int8"
"""


def started(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str
) -> tuple[ServeConfig, EngineOptions]:
    """What `vlm serve` would run with."""
    seen: list[tuple[ServeConfig, EngineOptions]] = []

    def spy(config_file: Path | None, given: dict[str, Any], print_config: bool) -> None:
        config, engine = serve_command.merged(config_file, given, environment)
        seen.append((config.value, engine.value))

    monkeypatch.setattr(serve_command, "serve_command", spy)
    app(["serve", *arguments], standalone_mode=False)
    return seen[0]


def test_an_option_wins_over_the_file_also_where_it_equals_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vlm.toml"
    file.write_text(FILE)
    from_file = started(monkeypatch, "--config", str(file))
    tables = read_config(file)
    assert from_file == (ServeConfig(**tables["serve"]), EngineOptions(**tables["engine"]))
    for index, config in enumerate(CONFIGS):
        for field in fields(config):
            if field.name not in tables[("serve", "engine")[index]]:
                continue
            option = f"--{field.name.replace('_', '-')}"
            default = field.default
            if default is False:
                words = [option.replace("--", "--no-")]
            else:
                words = [option, "default" if default == DEFAULT_MODEL else str(default)]
            found = started(monkeypatch, "--config", str(file), *words)
            expected = list(from_file)
            expected[index] = replace(from_file[index], **{field.name: default})
            assert list(found) == expected, words


def test_without_a_file_the_defaults_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert started(monkeypatch) == (ServeConfig(), EngineOptions())


@pytest.mark.parametrize(
    "options",
    [
        ("serve", "--port", "99999"),
        ("serve", "--threads", "0"),
        ("serve", "--root-path", "v1"),
        ("worker", "preprocess", "--concurrency", "0"),
        ("worker", "generate", "--kv-cache-mb", "-1"),
        ("worker", "encode", "--device", "no such"),
    ],
)
def test_an_option_out_of_range_is_one_line_and_exit_code_2(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: app(list(options), standalone_mode=False, prog_name="vlm"))
    assert ended.value.code == BAD_INPUT and capsys.readouterr().err.count("\n") == 1


@pytest.mark.redis
def test_a_redis_that_refuses_is_told_before_anything_starts(
    redis_server: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No password, a wrong one, no such database: of servers, workers and captioning alike."""
    with redis.Redis.from_url(redis_server.url) as admin:
        admin.config_set("requirepass", "right")
    place = f"127.0.0.1:{redis_server.port}"
    commands = [
        ("serve", "--port", "0"),
        ("worker", "preprocess"),
        ("worker", "generate"),
        ("caption", str(SAMPLES), "-o", str(tmp_path / "out.jsonl")),
    ]
    told = {
        f"redis://{place}/0": "the password is wrong or missing",
        f"redis://:wrong-secret@{place}/0": "the password is wrong or missing",
        f"redis://:right@{place}/9999": "DB index is out of range",
        "redis://127.0.0.1:99999/0": "out of range",
    }
    for command in commands:
        for url, reason in told.items():
            for options in (("--broker", url), ("--broker", f"redis://:right@{place}/0", "--store", url)):
                with pytest.raises(SystemExit) as ended:
                    run(lambda: app([*command, *options], standalone_mode=False, prog_name="vlm"))  # noqa: B023
                error = capfd.readouterr().err.splitlines()[-1]
                assert ended.value.code == BAD_INPUT and error.startswith(f"vlm: {options[-2][2:]}: ")
                assert reason in error and "secret" not in error
    check_access(broker=f"redis://:right@{place}/0", store="memory://")


def test_a_redis_that_is_away_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    check_access(broker="redis://127.0.0.1:1/0", store="")
    assert "broker: Redis at 127.0.0.1:1 can't be reached" in caplog.text


def test_a_kv_cache_that_holds_nothing_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm.config.MEBIBYTE", 64)
    with pytest.raises(ValueError, match="a KV cache of 64 bytes holds no block: 16 tokens take"):
        build_runner(EngineOptions(kv_cache_mb=1))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda:63", "nonsense"])
def test_an_engine_that_cannot_work_here_says_why(device: str) -> None:
    """In the process that asked for it, as a wrong setting and not as a crash."""
    with pytest.raises(EngineRefused, match=f"device is {device}"):
        asyncio.run(EngineProcess(engine_command(EngineOptions(device=device))).start())
