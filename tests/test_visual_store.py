"""Level 2 of the visual-token cache: what comes back is what was put, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.cluster.blobs import BlobStore, BlobStoreFull, open_store
from workers.cluster.visual_store import VisualStore
from workers.contract.visual_format import VisualFormat, pack, unpack

FORM = VisualFormat("revision-1", "float32", 8)
KEY = "a" * 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MakeStore = Callable[[int], BlobStore]


def tokens(rows: int = 4, form: VisualFormat = FORM, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, form.width, generator=generator).to(DTYPES[form.dtype])


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def make_store(request: pytest.FixtureRequest) -> Iterator[MakeStore]:
    url = "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")
    stores: list[BlobStore] = []

    def make(cap_bytes: int = 1 << 20) -> BlobStore:
        stores.append(open_store(url, cap_bytes, prefix="vlm:visual"))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_come_back_bit_for_bit(make_store: MakeStore, dtype: str) -> None:
    store = VisualStore(make_store(1 << 20), replace(FORM, dtype=dtype))
    rows = tokens(5, store.form)
    store.put(KEY, rows)
    got = store.get(KEY, 5)
    assert got.dtype == rows.dtype and torch.equal(got, rows)


def test_entries_outlive_the_process_that_wrote_them(make_store: MakeStore) -> None:
    VisualStore(make_store(1 << 20), FORM).put(KEY, tokens())
    blobs = make_store(1 << 20)
    if isinstance(blobs, type(open_store("memory://"))):
        return  # a memory store is the process's own: that it forgets is its nature
    assert torch.equal(VisualStore(blobs, FORM).get(KEY, 4), tokens())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_entry_is_refused_wherever_the_damage_is(data: st.DataObject) -> None:
    entry = bytearray(pack(tokens(), FORM))
    where = data.draw(st.integers(0, len(entry) - 1))
    entry[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError, match=r"entry|tokens"):
        unpack(bytes(entry), FORM, 4)
    with pytest.raises(ValueError, match=r"entry|tokens"):
        unpack(bytes(pack(tokens(), FORM))[:where], FORM, 4)


@pytest.mark.parametrize(
    "other",
    [replace(FORM, revision="revision-2"), replace(FORM, width=16), replace(FORM, dtype="float16")],
)
def test_an_entry_of_another_encoder_width_or_type_is_a_miss_and_goes(
    make_store: MakeStore, other: VisualFormat
) -> None:
    blobs = make_store(1 << 20)
    store = VisualStore(blobs, FORM)
    blobs.put(FORM.entry(KEY), pack(tokens(4, other), other), 60)
    assert store.get(KEY, 4) is None
    assert not store.has(KEY)


def test_an_entry_of_the_wrong_number_of_rows_is_a_miss(make_store: MakeStore) -> None:
    store = VisualStore(make_store(1 << 20), FORM)
    store.put(KEY, tokens(4))
    assert store.get(KEY, 5) is None and not store.has(KEY)


def test_processes_of_unlike_number_formats_never_meet(make_store: MakeStore) -> None:
    blobs = make_store(1 << 20)
    full, half = VisualStore(blobs, FORM), VisualStore(blobs, replace(FORM, dtype="float16"))
    full.put(KEY, tokens())
    assert not half.has(KEY) and half.get(KEY, 4) is None and full.has(KEY)


def test_what_was_not_used_for_longest_goes_first(make_store: MakeStore) -> None:
    size = len(pack(tokens(), FORM))
    blobs = make_store(20 * size)
    clocked = [VisualStore(blobs, FORM, ttl_s=100.0 + number) for number in range(20)]
    for number, store in enumerate(clocked):
        store.put(f"{number}", tokens(seed=number))
    VisualStore(blobs, FORM, ttl_s=500.0).get("0")
    VisualStore(blobs, FORM, ttl_s=200.0).put("new", tokens(seed=99))
    kept = [name for name in [*(str(n) for n in range(20)), "new"] if clocked[0].has(name)]
    assert "0" in kept and "new" in kept and "1" not in kept and "19" in kept
    assert blobs.used_bytes() <= 20 * size


def test_an_entry_larger_than_the_cap_is_refused(make_store: MakeStore) -> None:
    store = VisualStore(make_store(100), FORM)
    with pytest.raises(BlobStoreFull):
        store.put(KEY, tokens())


def test_renewing_keeps_a_blob_and_makes_none(make_store: MakeStore) -> None:
    blobs = make_store(1 << 20)
    blobs.put("a", b"1", 10)
    blobs.put("b", b"2", 20)
    assert blobs.oldest(2) == ["a", "b"]
    assert blobs.renew("a", 30) and not blobs.renew("c", 30)
    assert blobs.oldest(1) == ["b"] and not blobs.exists("c")
    assert blobs.used_bytes() == 2


def test_rows_that_are_not_of_the_form_are_not_written() -> None:
    for rows in (
        tokens(4, replace(FORM, width=4)),
        tokens(4, replace(FORM, dtype="float16")),
        torch.zeros(8),
    ):
        with pytest.raises(ValueError, match="visual tokens"):
            pack(rows, FORM)
