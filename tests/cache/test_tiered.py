"""The host's memory in front of a far store."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch

from epd.cache.handles import Acquired
from epd.cache.pool import PagePool
from epd.cache.stores.base import GetResult, PutResult, Store
from epd.cache.stores.tiered import TieredStore
from epd.cache.types import PageRun
from tests.cache.fakes import FakeStore
from tests.cache.tools import LAYOUT, FakeEncoder, make_cache, rows_of, wanted


class FakeHostStore(FakeStore):
    """A FakeStore whose hits are the host's."""

    def _get(self, key: str, buffers: object) -> GetResult:
        result = super()._get(key, buffers)  # type: ignore[arg-type]
        return GetResult.HOST if result is GetResult.STORE else result


def make_tiers() -> tuple[FakeHostStore, FakeStore, Store]:
    host, far = FakeHostStore(), FakeStore()
    return host, far, TieredStore(host, far)


async def test_a_far_hit_is_kept_on_the_host() -> None:
    """The first replica of a host pays the way, the second does not; both get the rows."""
    host, far, store = make_tiers()
    encoder = FakeEncoder()
    writer = make_cache(far)
    writer.release((await encoder.hold(writer, wanted(1), ask_store=False)).values())
    for tier in ("hits_store", "hits_host"):
        replica = make_cache(store)
        handle = (await replica.acquire([wanted(1)], claim=False, ask_store=True)).handles[wanted(1).key]
        assert torch.equal(torch.from_numpy(replica.rows(handle)), rows_of(wanted(1)))
        assert replica.stats()[tier] == 1
        replica.release([handle])
    assert host.objects == far.objects
    assert len(far.get_calls) == 1


def test_each_key_is_read_from_the_nearest_store_that_has_it() -> None:
    """A batch may be answered by both, and only what the host lacks is asked of the far store."""
    host, far, store = make_tiers()
    pool = PagePool(LAYOUT, 2, 4, pin=False)
    buffers = [pool.row_buffers((PageRun(page, 1),), 2) for page in range(3)]
    host.objects["a"] = far.objects["b"] = bytes(64)
    results = store.get_into(["a", "b", "c"], buffers)
    assert results == [GetResult.HOST, GetResult.STORE, GetResult.ABSENT]
    assert far.get_calls == [["b", "c"]]
    assert store.exists(["a", "b", "c"]) == [True, True, False]


def test_a_host_object_of_another_size_gives_way_to_the_far_one() -> None:
    """It is removed, and the far store's object takes its place."""
    host, far, store = make_tiers()
    pool = PagePool(LAYOUT, 2, 4, pin=False)
    host.objects["a"], far.objects["a"] = bytes(63), bytes(64)
    assert store.get_into(["a"], [pool.row_buffers((PageRun(0, 1),), 2)]) == [GetResult.STORE]
    assert host.objects == far.objects


def test_writes_go_to_both_and_the_far_store_decides() -> None:
    """A put that only the host took is no promise to readers elsewhere."""
    host, far, store = make_tiers()
    pool = PagePool(LAYOUT, 2, 4, pin=False)
    buffers = [pool.row_buffers((PageRun(0, 1),), 2)]
    assert store.put_from(["a"], buffers) == [PutResult.STORED]
    far.is_failing = True
    assert store.put_from(["b"], buffers) == [PutResult.FAILED]
    assert set(host.objects) == {"a", "b"}
    store.remove(["a"])
    assert set(host.objects) == {"b"}
    assert not far.objects
    store.close()
    assert host.is_closed
    assert far.is_closed


async def test_the_host_serves_on_while_the_far_store_fails() -> None:
    """A failing far store costs a miss for what is not on the host, and nothing for what is."""
    _, far, store = make_tiers()
    encoder = FakeEncoder()
    writer = make_cache(store)
    writer.release((await encoder.hold(writer, wanted(1))).values())
    far.is_failing = True
    reader = make_cache(store)
    acquired = await reader.acquire([wanted(1), wanted(2)], claim=False, ask_store=True)
    assert list(acquired.handles) == [wanted(1).key]
    assert acquired.missing == [wanted(2).key]
    assert reader.stats()["get_failures"] == 1
    reader.release(acquired.handles.values())
    await asyncio.gather(writer.close(), reader.close())


def at_once(acquire: Coroutine[Any, Any, Acquired]) -> Acquired | None:
    """What it returns when it never has to wait, else None."""
    try:
        acquire.send(None)
    except StopIteration as end:
        acquired: Acquired = end.value
        return acquired
    acquire.close()
    return None


async def test_small_rows_of_this_host_are_read_without_waiting() -> None:
    """They come in the step that asks for them, and are counted as the host's; large ones go by a thread."""
    host, _, store = make_tiers()
    writer = make_cache(host)
    writer.release((await FakeEncoder().hold(writer, wanted(1))).values())
    cache = make_cache(store)
    acquired = at_once(cache.acquire([wanted(1)], claim=False, ask_store=True))
    assert acquired is not None
    (handle,) = acquired.handles.values()
    assert torch.equal(torch.from_numpy(cache.rows(handle)), rows_of(wanted(1)))
    assert cache.stats()["hits_host"] == 1
    large = make_cache(store, inline_copy_bytes=8)
    assert at_once(large.acquire([wanted(1)], claim=False, ask_store=True)) is None
    for each in (cache, large):
        await each.close()


async def test_damaged_rows_of_this_host_are_removed_and_read_from_afar() -> None:
    """A flipped byte on the host costs one more read, of the far store, and is counted."""
    host, far, store = make_tiers()
    writer = make_cache(store)
    writer.release((await FakeEncoder().hold(writer, wanted(1))).values())
    key = str(wanted(1).key)
    host.objects[key] = far.objects[key][:-1] + bytes([far.objects[key][-1] ^ 1])
    cache = make_cache(store)
    (handle,) = (await cache.acquire([wanted(1)], claim=False, ask_store=True)).handles.values()
    assert torch.equal(torch.from_numpy(cache.rows(handle)), rows_of(wanted(1)))
    stats = cache.stats()
    assert (stats["integrity_failures"], stats["hits_host"], stats["hits_store"]) == (1, 0, 1)
    assert host.objects == far.objects


async def test_a_host_store_that_raises_leaves_the_read_to_the_thread() -> None:
    """A mistake in it loses no entry."""
    host, far, store = make_tiers()
    writer = make_cache(far)
    writer.release((await FakeEncoder().hold(writer, wanted(1))).values())
    raised: list[bool] = []

    def raise_once() -> None:
        if not raised:
            raised.append(True)
            raise RuntimeError("of the test")

    host.on_get = raise_once
    cache = make_cache(store)
    assert list((await cache.acquire([wanted(1)], claim=False, ask_store=True)).handles) == [wanted(1).key]
    assert raised
    cache.check_integrity()
