"""Images uploaded once and asked about by id; files on disk."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine_client import LiveServer, ask, data_uri, live_server, png
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.api.storage.files import FileStore
from vlm.api.storage.image_store import BlobImages, Images, MemoryImages, image_id
from vlm.config import ServeConfig
from vlm.requests.errors import ApiError
from workers.cluster.blobs import MemoryBlobStore

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(config=ServeConfig(data_dir=str(tmp_path_factory.mktemp("data")))) as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as http:
        yield http


def test_every_form_of_upload_gives_the_same_id(client: httpx.Client) -> None:
    data = png(120, 80)
    made = [
        client.post("/v1/images", files={"file": ("a.png", data)}),
        client.post("/v1/images", content=data, headers={"content-type": "application/octet-stream"}),
        client.post("/v1/images", content=data, headers={"content-type": "image/png"}),
        client.post("/v1/images", json={"image": data_uri(data)}),
    ]
    assert [answered.status_code for answered in made] == [200] * 4
    assert len({answered.json()["id"] for answered in made}) == 1
    stored = made[0].json()
    assert (stored["width"], stored["height"], stored["format"]) == (120, 80, "PNG")
    assert stored["tiles"] >= 1 and stored["image_tokens"] > 0 and stored["bytes"] == len(data)
    assert client.get(f"/v1/images/{stored['id']}").json()["tiles"] == stored["tiles"]


def test_an_image_is_asked_about_by_id_until_it_is_deleted(client: httpx.Client) -> None:
    """C4: a distinct, retryable 4xx afterwards; the client uploads again and repeats."""
    stored = client.post("/v1/images", files={"file": png(99, 88)}).json()
    body = ask({"type": "image_url", "image_url": {"url": stored["id"]}}, "What?")
    assert client.post(CHAT, json=body).status_code == 200
    assert client.delete(f"/v1/images/{stored['id']}").json() == {
        "id": stored["id"],
        "object": "image",
        "deleted": True,
    }
    gone = client.post(CHAT, json=body)
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "image_not_found"
    assert client.delete(f"/v1/images/{stored['id']}").status_code == 404
    client.post("/v1/images", files={"file": png(99, 88)})
    assert client.post(CHAT, json=body).status_code == 200


def test_an_id_stays_bound_to_its_content(client: httpx.Client) -> None:
    """C3: a client's id for other bytes is a conflict, never a stale answer."""
    first = client.post("/v1/images", json={"image": data_uri(png(10, 11))}).json()["id"]
    again = client.post("/v1/images", json={"image": data_uri(png(10, 11)), "id": first})
    assert again.status_code == 200 and again.json()["id"] == first
    conflict = client.post("/v1/images", json={"image": data_uri(png(10, 12)), "id": first})
    assert conflict.status_code == 400 and conflict.json()["error"]["code"] == "image_id_conflict"


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"content": b"x", "headers": {"content-type": "text/plain"}}, 415, "unsupported_media_type"),
        ({"content": b""}, 415, "unsupported_media_type"),
        ({"content": b"", "headers": {"content-type": "image/png"}}, 400, "empty_image"),
        ({"content": b"x", "headers": {"content-type": "image/png"}}, 400, "unsupported_image_format"),
        ({"data": {"a": "b"}, "files": {"other": b"x"}}, 400, "missing_required_parameter"),
        ({"json": {"image": "https://a.test/b.png"}}, 400, "url_fetching_disabled"),
        ({"json": {"image": 3}}, 400, "invalid_value"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_json"),
        ({"content": b"--x", "headers": {"content-type": "multipart/form-data"}}, 400, "invalid_request"),
    ],
)
def test_wrong_uploads_are_refused(
    client: httpx.Client, options: dict[str, object], status: int, code: str
) -> None:
    answered = client.post("/v1/images", **options)  # type: ignore[arg-type]
    assert (answered.status_code, answered.json()["error"]["code"]) == (status, code)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "blobs"])
def images(request: pytest.FixtureRequest) -> Iterator[tuple[Images, Clock]]:
    clock = Clock()
    if request.param == "memory":
        yield MemoryImages(1000, 60.0, clock), clock
    else:
        yield BlobImages(MemoryBlobStore(1200, clock), 60.0, clock), clock


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_image_stores_keep_by_namespace_until_their_time(images: tuple[Images, Clock]) -> None:
    """One suite over both twins."""
    store, clock = images

    async def run() -> None:
        stored, entry = await store.put("a", digest(b"x" * 10), b"x" * 10)
        assert (entry.created_at, entry.expires_at) == (1000.0, 1060.0)
        assert await store.read("a", stored) == b"x" * 10
        with pytest.raises(ApiError, match="not stored"):
            await store.read("b", stored)
        clock.now += 59
        await store.put("a", digest(b"x" * 10), b"x" * 10)
        clock.now += 59
        assert await store.read("a", stored) == b"x" * 10
        clock.now += 2
        with pytest.raises(ApiError, match="not stored"):
            await store.read("a", stored)

    asyncio.run(run())


@settings(deadline=None, max_examples=50)
@given(stored=st.binary(max_size=40))
def test_bytes_of_another_image_under_an_id_are_a_miss(stored: bytes) -> None:
    blobs = MemoryBlobStore()
    store = BlobImages(blobs, 60.0)

    async def run() -> None:
        name, _ = await store.put("a", digest(b"x" * 10), b"x" * 10)
        blobs.put(store._key("a", name), stored, 60.0)
        with pytest.raises(ApiError, match="not stored"):
            await store.read("a", name)
        assert blobs.used_bytes() == 0

    asyncio.run(run())


def test_image_stores_never_pass_their_cap(images: tuple[Images, Clock]) -> None:
    """C8: the memory twin forgets what was asked for least recently, the shared one refuses."""
    store, _ = images

    async def run() -> None:
        kept = 0
        for i in range(5):
            data = bytes([i]) * 400
            try:
                await store.put("", digest(data), data)
                kept += 1
            except ApiError as error:
                assert error.status_code == 503 and error.code == "image_store_full"
        assert kept >= 2
        with pytest.raises(ApiError):
            await store.put("", digest(b"y" * 1300), b"y" * 1300)

    asyncio.run(run())
    if isinstance(store, MemoryImages):
        assert store.num_bytes == 800 and len(store) == 2


@settings(deadline=None, max_examples=100)
@given(
    a=st.tuples(st.text(max_size=8), st.text(max_size=8)),
    b=st.tuples(st.text(max_size=8), st.text(max_size=8)),
)
def test_ids_differ_when_namespace_or_content_does(a: tuple[str, str], b: tuple[str, str]) -> None:
    assert (image_id(*a) == image_id(*b)) == (a == b)


def test_official_client_keeps_files(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as official:
        made = official.files.create(file=("rows.jsonl", b'{"a": 1}\n'), purpose="batch")
        assert (made.object, made.bytes, made.filename, made.purpose) == ("file", 9, "rows.jsonl", "batch")
        assert official.files.retrieve(made.id) == made
        assert official.files.content(made.id).read() == b'{"a": 1}\n'
        assert made.id in [file.id for file in official.files.list()]
        assert official.files.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            official.files.retrieve(made.id)


def test_files_are_listed_in_pages(client: httpx.Client) -> None:
    for i in range(5):
        client.post("/v1/files", files={"file": (f"{i}", b"x")}, data={"purpose": "user_data"})
    whole = client.get("/v1/files", params={"purpose": "user_data"}).json()
    ids = [file["id"] for file in whole["data"]]
    assert len(ids) == 5 and not whole["has_more"]
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = client.get("/v1/files", params={"purpose": "user_data", "limit": "2", **after}).json()
        seen += [file["id"] for file in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ids
    backwards = client.get("/v1/files", params={"purpose": "user_data", "order": "asc"}).json()
    assert [file["id"] for file in backwards["data"]] == ids[::-1]
    assert client.get("/v1/files", params={"after": "file-none"}).status_code == 400
    assert client.get("/v1/files", params={"limit": "0"}).json()["error"]["param"] == "limit"


def test_file_caps_leave_nothing_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_file_bytes=100, max_total_bytes=150)
    kept = store.add("", "a", "batch", io.BytesIO(b"x" * 90))
    for data, code in ((b"x" * 101, "file_too_large"), (b"x" * 61, "file_store_full")):
        with pytest.raises(ApiError) as caught:
            store.add("", "b", "batch", io.BytesIO(data))
        assert caught.value.code == code and caught.value.status_code == 413
    assert sorted(path.suffix for path in tmp_path.rglob("file-*")) == [".bin", ".json"]
    assert store.list("") == [kept] and store.list("other") == []


def test_what_a_crash_left_half_done_is_removed_after_an_hour(tmp_path: Path) -> None:
    now = time.time()
    store = FileStore(tmp_path, max_file_bytes=100, max_total_bytes=150, clock=lambda: now)
    kept = store.add("a", "a", "batch", io.BytesIO(b"x" * 90))
    folder = store.path("a", kept.id).parent
    for name in ("file-1.part", "file-2.bin", "file-3.meta"):
        (folder / name).write_bytes(b"x" * 60)
    store.sweep()
    assert len(list(folder.iterdir())) == 5
    now += 3700
    store.sweep()
    assert {path.stem for path in folder.iterdir()} == {kept.id} and store.list("a") == [kept]
    store.add("a", "b", "batch", io.BytesIO(b"x" * 60))


def test_official_client_says_how_long_a_file_is_kept(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as official:
        sent: Any = {"file": ("a", b"x"), "purpose": "user_data"}
        made = official.files.create(**sent, expires_after={"anchor": "created_at", "seconds": 7200})
        assert made.expires_at == made.created_at + 7200
        for wrong in ({"anchor": "created_at", "seconds": 60}, {"anchor": "now", "seconds": 7200}):
            with pytest.raises(openai.BadRequestError):
                official.files.create(**sent, expires_after=wrong)  # type: ignore[arg-type]


def test_expired_files_are_gone_and_leave_their_room(tmp_path: Path) -> None:
    now = 1000.0
    store = FileStore(tmp_path, max_file_bytes=100, max_total_bytes=100, clock=lambda: now)
    first, second = (store.add("a", "a", "batch", io.BytesIO(b"x" * 40), 3600) for _ in range(2))
    now += 3599
    assert store.get("a", first.id) == first
    now += 1
    for read in (store.get, store.locate):
        with pytest.raises(ApiError):
            read("a", first.id)
    kept = store.add("a", "b", "batch", io.BytesIO(b"x" * 90))
    assert store.list("a") == [kept] and {path.stem for path in tmp_path.rglob("file-*")} == {kept.id}
    assert second.expires_at == 4600


def test_adopted_files_are_moved_in(tmp_path: Path) -> None:
    store = FileStore(tmp_path, max_file_bytes=100, max_total_bytes=150)
    written = tmp_path / "out.jsonl"
    written.write_bytes(b"row\n")
    adopted = store.adopt("a", "out.jsonl", "batch_output", written)
    assert store.path("a", adopted.id).read_bytes() == b"row\n" and not written.exists()
    with pytest.raises(ApiError):
        store.path("b", adopted.id)
    with pytest.raises(ApiError):
        store.path("a", "../../etc/passwd")


@pytest.mark.parametrize(
    "options",
    [
        {"files": {"file": b"x"}},
        {"files": {"file": b"x"}, "data": {"purpose": "assistants"}},
        {"files": {"file": b"x"}, "data": {"purpose": "batch_output"}},
        {"files": {"other": b"x"}, "data": {"purpose": "batch"}},
    ],
)
def test_wrong_file_uploads_are_400(client: httpx.Client, options: dict[str, object]) -> None:
    assert client.post("/v1/files", **options).status_code == 400  # type: ignore[arg-type]
