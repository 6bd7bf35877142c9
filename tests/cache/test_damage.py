"""Stored objects that are not what their key promises: each is a miss, counted, removed, and made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from epd.cache.controller import EmbeddingCache
from epd.cache.entry import HEADER_BYTES, EntryHeader
from epd.cache.keys import media_key
from epd.cache.pool import PagePool
from epd.cache.stores.shared_memory import SharedMemoryStore
from epd.cache.types import RowLayout, Wanted
from tests.cache.fakes import FakeStore
from tests.cache.tools import LAYOUT, FakeEncoder, make_cache, rows_of, wanted

ITEM, OTHER = wanted(1), wanted(2)


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def reheaded(data: bytes, **fields: object) -> bytes:
    """The object with another header before the same rows."""
    header = replace(EntryHeader.decode(data[:HEADER_BYTES]), **fields)  # type: ignore[arg-type]
    return header.encode() + data[HEADER_BYTES:]


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "too short": lambda data, other: data[:-1],
    "too long": lambda data, other: data + b"\0",
    "empty": lambda data, other: b"",
    "header only": lambda data, other: data[:HEADER_BYTES],
    "first byte of the rows": lambda data, other: flipped(data, HEADER_BYTES),
    "last byte of the rows": lambda data, other: flipped(data, len(data) - 1),
    "first byte of the header": lambda data, other: flipped(data, 0),
    "zeros": lambda data, other: bytes(len(data)),
    "the object of another key": lambda data, other: other,
    "the rows of another key": lambda data, other: data[:HEADER_BYTES] + other[HEADER_BYTES:],
    "another dtype of one size": lambda data, other: reheaded(data, dtype="int32"),
    "another row width": lambda data, other: reheaded(data, row_dim=4, num_tokens=6),
    "another grid": lambda data, other: reheaded(data, grid=(1, 6, 2)),
    "another namespace": lambda data, other: reheaded(data, key="elsewhere/" + ITEM.key.digest),
    "another version": lambda data, other: reheaded(data, version=2),
}


async def stored_objects() -> FakeStore:
    """A store that holds ITEM and OTHER."""
    store = FakeStore()
    cache = make_cache(store)
    cache.release((await FakeEncoder().hold(cache, ITEM, OTHER)).values())
    return store


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_object_is_a_miss_and_is_replaced(damage: str) -> None:
    """Its rows reach nobody, its neighbour in the batch is hit, and afterwards the store is sound."""
    store = await stored_objects()
    good = dict(store.objects)
    key = str(ITEM.key)
    store.objects[key] = DAMAGES[damage](good[key], good[str(OTHER.key)])
    cache = make_cache(store)
    acquired = await cache.acquire([ITEM, OTHER], claim=True, ask_store=True)
    assert list(acquired.handles) == [OTHER.key]
    assert cache.stats()["integrity_failures"] == 1
    assert store.removed == [key]
    handle = await cache.fill(acquired.tickets[ITEM.key], rows_of(ITEM))
    assert await cache.publish([handle]) == {ITEM.key: True}
    assert store.objects == good
    cache.release([handle, *acquired.handles.values()])
    cache.check_integrity()


async def test_another_dtype_or_namespace_never_shares_rows() -> None:
    """A cache of bfloat16 finds nothing usable under the float32 key, and nothing at all under its own."""
    store = await stored_objects()
    half = EmbeddingCache(PagePool(RowLayout(16, torch.bfloat16), 2, 12, pin=False), store)
    acquired = await half.acquire([ITEM], claim=False, ask_store=True)  # as many bytes, other rows
    assert acquired.missing == [ITEM.key]
    assert half.stats()["integrity_failures"] == 1
    elsewhere = Wanted(media_key("elsewhere", b"picture 1"), ITEM.grid, ITEM.num_tokens)
    cache = make_cache(store)
    assert (await cache.acquire([elsewhere], claim=False, ask_store=True)).missing == [elsewhere.key]
    assert cache.stats()["integrity_failures"] == 0


async def test_a_damaged_file_on_the_host_is_replaced(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The same over files: found by the checksum, removed, made anew, hit."""
    store = SharedMemoryStore("a", 1 << 20, parent=tmp_path)
    encoder = FakeEncoder()
    first = make_cache(store)
    first.release((await encoder.hold(first, ITEM)).values())
    (file,) = (path for path in (tmp_path / "epd-a").iterdir() if not path.name.startswith("."))
    file.write_bytes(flipped(file.read_bytes(), HEADER_BYTES + 5))
    for encodes in (2, 2):
        cache = make_cache(store)
        handle = (await encoder.hold(cache, ITEM))[ITEM]
        assert torch.equal(torch.from_numpy(cache.rows(handle)), rows_of(ITEM))
        assert encoder.num_encoded == encodes
        cache.release([handle])
    assert LAYOUT.row_bytes * ITEM.num_tokens + HEADER_BYTES == file.stat().st_size
