"""One contract for every blob store."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from conftest import RedisServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.cluster.blobs import BlobStore, BlobStoreFull, BlobStoreUnavailable, MemoryBlobStore, open_store
from workers.cluster.redis_client import connect

MakeStore = Callable[[int], BlobStore]


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")
    stores: list[BlobStore] = []

    def make(cap_bytes: int = 1 << 20) -> BlobStore:
        stores.append(open_store(url, cap_bytes))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def test_what_was_put_is_got(make_store: MakeStore) -> None:
    store = make_store(1 << 20)
    data = bytes(range(256)) * 5
    store.put("a", data, 60)
    assert store.get("a") == data
    assert store.exists("a") and not store.exists("b")
    assert store.get("b") is None
    assert store.used_bytes() == len(data)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer_comes_back_as_bytes_of_its_own(make_store: MakeStore, kind: type) -> None:
    store = make_store(1 << 20)
    source = bytearray(b"before")
    store.put("a", kind(source), 60)
    source[:] = b"after!"
    got = store.get("a")
    assert type(got) is bytes and got == b"before"


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 300_000])
def test_large_blob_comes_back_whole(make_store: MakeStore, size: int) -> None:
    store = make_store(1 << 20)
    data = random.Random(size).randbytes(size)
    store.put("a", data, 60)
    assert store.get("a") == data


def test_empty_blob_is_a_blob(make_store: MakeStore) -> None:
    store = make_store(1 << 20)
    store.put("a", b"", 60)
    assert store.exists("a") and store.get("a") == b""


def test_delete_gives_the_bytes_back_and_may_be_repeated(make_store: MakeStore) -> None:
    store = make_store(10)
    store.put("a", b"x" * 10, 60)
    store.delete("a")
    store.delete("a")
    assert store.used_bytes() == 0 and not store.exists("a")
    store.put("b", b"y" * 10, 60)


def test_full_store_refuses_and_keeps_what_it_has(make_store: MakeStore) -> None:
    store = make_store(10)
    store.put("a", b"x" * 6, 60)
    with pytest.raises(BlobStoreFull):
        store.put("b", b"y" * 5, 60)
    assert store.get("a") == b"x" * 6 and not store.exists("b")
    assert store.used_bytes() == 6
    store.put("b", b"y" * 4, 60)


def test_writing_a_key_again_counts_it_once(make_store: MakeStore) -> None:
    store = make_store(10)
    for size in (6, 10, 3):
        store.put("a", b"x" * size, 60)
        assert store.used_bytes() == size


def test_blob_ends_with_its_lifetime_and_its_bytes_are_free_again(make_store: MakeStore) -> None:
    store = make_store(10)
    store.put("a", b"x" * 10, 0.05)
    deadline = time.monotonic() + 5
    while store.exists("a"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert store.get("a") is None
    store.put("b", b"y" * 10, 60)
    assert store.used_bytes() == 10


def test_writing_a_key_again_renews_its_lifetime(make_store: MakeStore) -> None:
    store = make_store(10)
    store.put("a", b"x", 0.2)
    store.put("a", b"x", 60)
    time.sleep(0.3)
    assert store.exists("a") and store.used_bytes() == 1


def test_writers_at_once_never_pass_the_cap(make_store: MakeStore) -> None:
    store = make_store(100)
    refused: list[int] = []

    def write(number: int) -> None:
        try:
            store.put(f"k{number}", b"x" * 30, 60)
        except BlobStoreFull:
            refused.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5 and store.used_bytes() == 90


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40), st.booleans()), max_size=20))
def test_count_equals_what_is_kept_after_any_history(
    make_store: MakeStore, history: list[tuple[str, int, bool]]
) -> None:
    store = make_store(100)
    for key in "abcd":
        store.delete(key)
    kept: dict[str, int] = {}
    for key, size, delete in history:
        if delete:
            store.delete(key)
            kept.pop(key, None)
            continue
        fits = sum(kept.values()) - kept.get(key, 0) + size <= 100
        if fits:
            store.put(key, bytes(size), 60)
            kept[key] = size
        else:
            with pytest.raises(BlobStoreFull):
                store.put(key, bytes(size), 60)
    assert store.used_bytes() == sum(kept.values())
    assert {key for key in "abcd" if store.exists(key)} == set(kept)


def test_memory_lifetime_follows_its_clock() -> None:
    now = [0.0]
    store = MemoryBlobStore(clock=lambda: now[0])
    store.put("a", b"x", 5)
    now[0] = 4.9
    assert store.exists("a")
    now[0] = 5.0
    assert not store.exists("a")


@pytest.mark.redis
def test_two_clients_share_one_cap(redis_url: str) -> None:
    first, second = open_store(redis_url, 10), open_store(redis_url, 10)
    first.put("a", b"x" * 6, 60)
    with pytest.raises(BlobStoreFull):
        second.put("b", b"y" * 6, 60)
    assert second.get("a") == b"x" * 6
    first.close()
    second.close()


@pytest.mark.redis
def test_redis_at_its_own_memory_limit_is_a_full_store_and_other_keys_stay(redis_server: RedisServer) -> None:
    client = connect(redis_server.url)
    client.set("queue", b"precious")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
    store = open_store(redis_server.url)
    with pytest.raises(BlobStoreFull):
        for number in range(100):
            store.put(f"k{number}", bytes(1 << 17), 60)
    assert client.get("queue") == b"precious"
    store.close()
    client.close()


@pytest.mark.redis
def test_lost_redis_is_unavailable_and_comes_back(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url)
    store.put("a", b"x", 60)
    redis_server.stop()
    for call in (lambda: store.put("b", b"y", 60), lambda: store.get("a"), lambda: store.exists("a")):
        with pytest.raises(BlobStoreUnavailable):
            call()
    redis_server.start()
    assert store.get("a") == b"x" and store.used_bytes() == 1
    store.close()


@pytest.mark.redis
def test_patient_client_waits_for_redis_to_come_back(redis_server: RedisServer) -> None:
    store = open_store(redis_server.url, patience_s=20)
    redis_server.stop()
    timer = threading.Timer(1.0, redis_server.start)
    timer.start()
    store.put("a", b"x", 60)
    timer.join()
    assert store.get("a") == b"x"
    store.close()


def test_unknown_store_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        open_store("memcached://x")
