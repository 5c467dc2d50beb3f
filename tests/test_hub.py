"""Checkpoints by hub id: downloaded once, whole, of one commit, resumed, checked; else a clear line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fidelity import DEFAULT_MODEL, random_checkpoint
from local_hub import LocalHub, Repo, files_of

from vlm.hub import Hub, HubError, HubId, cached_repo, parse_hub_id
from vlm.model_source import ModelSource
from vlm.spec import ModelSpec

NAME = "some-org/Some.Model-1"
ID = HubId(NAME)
SAMPLE = str(Path(DEFAULT_MODEL).parent / "samples" / "invoice.png")
STRANGERS = {
    "README.md": b"# card",
    "pytorch_model.bin": b"\x80\x04",
    "modeling_x.py": b"import os",
    ".gitattributes": b"",
}


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub().running() as hub:
        hub.repos[NAME] = Repo(files_of(Path(DEFAULT_MODEL)) | STRANGERS)
        yield hub


@pytest.fixture
def client(hub: LocalHub, tmp_path: Path) -> Hub:
    return Hub(endpoint=hub.url, cache=tmp_path / "cache", token="x")


def vlm(hub: LocalHub, home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, "-m", "vlm.cli.main", *arguments],
        env=environment | env,
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", HubId("a/b")),
        ("Qwen/Qwen2.5-VL-3B-Instruct@main", HubId("Qwen/Qwen2.5-VL-3B-Instruct", "main")),
        ("a/b@refs/pr/1", HubId("a/b", "refs/pr/1")),
        ("a", None),
        ("a/b/c", None),
        ("../b", None),
        ("a/b@", None),
        ("a/b@-x", None),
        ("/tmp/x", None),
    ],
)
def test_ids_are_told_from_paths(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected


def test_only_what_is_read_is_fetched_once_and_of_one_commit(hub: LocalHub, client: Hub) -> None:
    folder = client.fetch(ID)
    assert {path.name for path in folder.iterdir()} == files_of(Path(DEFAULT_MODEL)).keys() - {"README.md"}
    assert folder.name == hub.repos[NAME].commit and cached_repo(folder) == NAME
    assert ModelSpec.load(folder).revision == ModelSpec.load("default").revision
    assert ModelSource(folder).name == NAME
    before = hub.gets.copy()
    assert client.fetch(ID) == folder
    assert hub.gets == before  # nothing is sent again


def test_a_changed_repository_is_another_commit_beside_the_first(hub: LocalHub, client: Hub) -> None:
    first = client.fetch(ID)
    old = hub.repos[NAME].commit
    hub.repos[NAME].files["generation_config.json"] = b'{"eos_token_id": 5}'
    second = client.fetch(ID)
    assert (first.name, second.name) == (old, hub.repos[NAME].commit) and old != second.name
    assert json.loads((second / "generation_config.json").read_text()) == {"eos_token_id": 5}
    assert (first / "config.json").is_file()


def test_a_broken_download_goes_on_where_it_stopped(hub: LocalHub, client: Hub) -> None:
    """huggingface_hub writes pieces of 10 MiB: what a broken connection brought of the last one is lost."""
    whole = random.Random(0).randbytes(24 << 20)
    hub.repos[NAME] = Repo({"config.json": b"{}", "model.safetensors": whole})
    hub.die_after["model.safetensors"] = 22 << 20
    assert (client.fetch(ID) / "model.safetensors").read_bytes() == whole
    assert [name for name, _ in hub.ranges] == ["model.safetensors"]
    assert hub.ranges[0][1] == f"bytes={20 << 20}-"


@pytest.mark.parametrize("fault", ["other bytes", "cut short"])
def test_a_file_that_arrives_damaged_is_never_used(hub: LocalHub, client: Hub, fault: str) -> None:
    true = hub.repos[NAME].files["model.safetensors"]
    hub.lies["model.safetensors"] = true[:-8] + b"\0" * 8 if fault == "other bytes" else true[:-8]
    with pytest.raises(HubError, match=r"arrived damaged|broke|stored"):
        client.fetch(ID)
    hub.lies.clear()
    assert (client.fetch(ID) / "model.safetensors").read_bytes() == true


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_file_that_arrived_damaged_before_a_kill_is_never_used(
    hub: LocalHub, client: Hub, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    """Between its arrival and the reading of its digest."""
    true = hub.repos[NAME].files["model.safetensors"]
    hub.lies["model.safetensors"] = true[:-8] + b"\0" * 8

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("vlm.hub._check_digest", killed)
        with pytest.raises(Killed):
            client.fetch(ID)
    hub.lies.clear()
    if is_offline:
        monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
        with pytest.raises(HubError, match=r"lacks model\.safetensors"):
            client.fetch(ID)
    else:
        assert (client.fetch(ID) / "model.safetensors").read_bytes() == true
    assert not list(client._unchecked(ID).iterdir())


def test_a_file_that_arrived_whole_before_a_kill_is_kept(
    hub: LocalHub, client: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = client._unchecked(ID)
    with monkeypatch.context() as patched:
        patched.setattr("vlm.hub._check_digest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            client.fetch(ID)
    assert len(list(note.iterdir())) == 1
    hub.ranges.clear()
    assert (client.fetch(ID) / "model.safetensors").read_bytes() == hub.repos[NAME].files["model.safetensors"]
    assert not hub.ranges and not list(note.iterdir())


def test_shards_are_those_that_the_index_names(hub: LocalHub, client: Hub, tmp_path: Path) -> None:
    files = files_of(random_checkpoint(tmp_path / "made", 3, shard_size="60KB"))
    shards = {name for name in files if name.endswith(".safetensors")}
    assert len(shards) > 1
    hub.repos[NAME] = Repo(files | {"consolidated.safetensors": b"not ours"})
    folder = client.fetch(ID)
    assert {path.name for path in folder.glob("*.safetensors")} == shards
    lost = sorted(shards)[-1]
    del hub.repos[NAME].files[lost]
    with pytest.raises(HubError, match=f"lacks {lost}"):
        client.fetch(ID)


def test_an_index_leads_nowhere_else(hub: LocalHub, client: Hub) -> None:
    files = hub.repos[NAME].files
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../../x.safetensors"}}).encode()
    with pytest.raises(HubError, match="outside its directory"):
        client.fetch(ID)


def missing(hub: LocalHub) -> HubId:
    return HubId("some-org/none")


def other_revision(hub: LocalHub) -> HubId:
    return HubId(NAME, "v9")


def gated(hub: LocalHub) -> HubId:
    hub.repos[NAME].gated = True
    return ID


def private(hub: LocalHub) -> HubId:
    hub.repos[NAME].token = "secret"
    return ID


def without_weights(hub: LocalHub) -> HubId:
    del hub.repos[NAME].files["model.safetensors"]
    return ID


def without_config(hub: LocalHub) -> HubId:
    del hub.repos[NAME].files["config.json"]
    return ID


def failing(hub: LocalHub) -> HubId:
    hub.status = 418
    return ID


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (missing, "has no model some-org/none"),
        (other_revision, "has no revision v9"),
        (gated, "is gated: accept its terms"),
        (private, "or it is private"),
        (without_weights, "has no safetensors weights"),
        (without_config, "has no config.json"),
        (failing, "answered 418"),
    ],
)
def test_what_can_not_be_had_is_one_line_that_says_why(
    hub: LocalHub, client: Hub, ask: Any, said: str
) -> None:
    model = ask(hub)
    with pytest.raises(HubError, match=said) as caught:
        client.fetch(model)
    assert "\n" not in str(caught.value)


def test_what_is_here_whole_serves_while_the_hub_is_away(hub: LocalHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = Hub(endpoint=hub.url, cache=cache).fetch(ID)
    away = Hub(endpoint="http://127.0.0.1:9", cache=cache)
    assert away.fetch(ID) == folder
    with pytest.raises(HubError, match="not in the cache"):
        away.fetch(HubId("some-org/other"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(HubError, match=r"only partly in the cache \(it lacks model\.safetensors\)"):
        away.fetch(ID)
    assert away.fetch(ID, "text") == folder


def test_the_planner_reads_json_alone(hub: LocalHub, tmp_path: Path) -> None:
    done = vlm(hub, tmp_path, "plan", "image", SAMPLE, "--model", NAME, "--json")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" not in hub.gets and "tokenizer.json" not in hub.gets


def test_the_environment_means_what_it_means_to_other_tools(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos[NAME].token = "secret"
    refused = vlm(hub, tmp_path, "pull", NAME)
    assert refused.returncode == 2 and "private" in refused.stderr and "Traceback" not in refused.stderr
    pulled = vlm(hub, tmp_path, "pull", f"{NAME}@main", "--json", HF_TOKEN="secret")
    assert pulled.returncode == 0, pulled.stderr
    about = json.loads(pulled.stdout.splitlines()[-1])
    assert about["revision"] == hub.repos[NAME].commit and about["complete"]
    assert Path(about["path"]).is_relative_to(tmp_path)
    seen = sum(hub.gets.values())
    listed = vlm(hub, tmp_path, "models", "--json", HF_HUB_OFFLINE="1")
    names = [here["name"] for here in json.loads(listed.stdout)["models"]]
    assert names == ["default", NAME]
    answered = vlm(hub, tmp_path, "ask", SAMPLE, "What is the total?", "--model", NAME, HF_HUB_OFFLINE="1")
    assert answered.returncode == 0 and answered.stdout.strip(), answered.stderr
    assert sum(hub.gets.values()) == seen


def test_a_model_that_no_family_claims_is_named_with_the_nearest(hub: LocalHub, tmp_path: Path) -> None:
    hub.repos[NAME].files["config.json"] = b'{"model_type": "idefics9"}'
    done = vlm(hub, tmp_path, "ask", SAMPLE, "x", "--model", NAME)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vlm: ") and "model_type idefics9 is not supported" in last
    assert "idefics3" in done.stderr
