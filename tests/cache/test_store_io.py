"""Deadlines and failures of the store, and pages that a call may still touch."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest
import torch

from epd.cache.errors import CacheClosed
from tests.cache.fakes import FakeStore
from tests.cache.tools import FakeEncoder, loaded, make_cache, rows_of, wanted


async def until(event: Event) -> None:
    """Waits for an event of another thread."""
    await asyncio.to_thread(event.wait)


class FakeSlowStore(FakeStore):
    """A FakeStore that tells when a get or put has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.got, self.put = Event(), Event()
        self.on_get, self.on_put = self.got.set, self.put.set


async def test_a_get_that_hangs_costs_an_encode_and_keeps_its_pages_until_it_ends() -> None:
    """After the deadline the request gets a ticket with other pages; the old ones drain meanwhile."""
    store, encoder = FakeSlowStore(), FakeEncoder()
    writer = make_cache(store)
    writer.release((await encoder.hold(writer, wanted(1))).values())
    store.get_gate.clear()
    cache = make_cache(store, timeout_s=0.01)
    handle = (await encoder.hold(cache, wanted(1), publish=False))[wanted(1)]
    stats = cache.stats()
    assert (stats["pages_draining"], stats["calls_hung"], stats["get_timeouts"]) == (2, 1, 1)
    assert stats["pages_free"] == 12 - 2 - 2
    cache.check_integrity()
    store.get_gate.set()
    await cache.close()
    assert cache.stats()["pages_draining"] == 0
    assert torch.equal(torch.from_numpy(cache.rows(handle)), rows_of(wanted(1)))
    cache.release([handle])
    cache.check_integrity()
    await writer.close()


async def test_without_claim_a_get_that_hangs_is_a_miss() -> None:
    """The request goes on at its deadline."""
    store = FakeSlowStore()
    store.get_gate.clear()
    cache = make_cache(store, timeout_s=0.01)
    assert (await cache.acquire([wanted(1)], claim=False, ask_store=True)).missing == [wanted(1).key]
    store.get_gate.set()
    await cache.close()
    cache.check_integrity()
    assert cache.stats()["pages_free"] == 12


async def test_requests_that_joined_a_hung_get_share_one_encode() -> None:
    """All of them start anew with other pages; the first makes the rows, the others join it."""
    store, encoder = FakeSlowStore(), FakeEncoder()
    store.get_gate.clear()
    cache = make_cache(store, timeout_s=0.01)
    held = await asyncio.gather(*(encoder.hold(cache, wanted(1), publish=False) for _ in range(3)))
    assert encoder.num_encoded == 1
    cache.release([handle for handles in held for handle in handles.values()])
    store.get_gate.set()
    await cache.close()
    cache.check_integrity()


async def test_hung_gets_are_bounded() -> None:
    """However often a dead store is asked, threads and draining pages stay within their bounds."""
    store = FakeSlowStore()
    store.get_gate.clear()
    cache = make_cache(store, timeout_s=0.005, get_threads=1, num_pages=40, max_queued_gets=2)
    for number in range(30):
        acquired = await cache.acquire([wanted(number)], claim=False, ask_store=True)
        assert acquired.missing == [wanted(number).key]
        cache.check_integrity()
    assert cache.stats()["pages_draining"] <= (1 + 4) * 2
    store.get_gate.set()
    await cache.close()
    assert cache.stats()["pages_free"] == 40


async def test_a_full_get_queue_is_a_miss_at_once() -> None:
    """What the threads cannot keep up with is not waited for."""
    store = FakeSlowStore()
    store.get_gate.clear()
    cache = make_cache(store, get_threads=1, max_queued_gets=1)
    waiting = [
        asyncio.create_task(cache.acquire([wanted(number)], claim=False, ask_store=True)) for number in (1, 2)
    ]
    await asyncio.sleep(0)
    await until(store.got)
    waiting[1].cancel()  # its fetch goes on
    assert (await cache.acquire([wanted(3)], claim=False, ask_store=True)).missing == [wanted(3).key]
    assert cache.stats()["get_skipped"] == 1
    store.get_gate.set()
    await waiting[0]
    await cache.close()
    cache.check_integrity()


async def test_a_store_that_raises_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """An exception out of the library fails no request; it is counted and logged."""
    store, encoder = FakeStore(), FakeEncoder()

    def explode() -> None:
        raise OSError("broken")

    store.on_get = store.on_put = explode
    cache = make_cache(store)
    handle = (await encoder.hold(cache, wanted(1)))[wanted(1)]
    assert (cache.stats()["get_failures"], cache.stats()["put_failures"]) == (1, 1)
    assert "broken" in caplog.text
    cache.release([handle])
    cache.check_integrity()


async def test_a_failed_put_is_false_and_counted() -> None:
    """publish tells which keys others can read."""
    store, encoder = FakeStore(), FakeEncoder()
    cache = make_cache(store)
    held = await encoder.hold(cache, wanted(1), publish=False)
    store.is_failing = True
    assert await cache.publish(held.values()) == {wanted(1).key: False}
    store.is_failing = False
    assert await cache.publish(held.values()) == {wanted(1).key: True}
    assert (cache.stats()["put_failures"], cache.stats()["put_keys"]) == (1, 2)
    cache.release(held.values())
    assert await cache.publish(held.values()) == {wanted(1).key: False}


async def test_without_a_store_nothing_is_published() -> None:
    """All keys are False, and nothing is counted as put."""
    cache, encoder = make_cache(), FakeEncoder()
    held = await encoder.hold(cache, wanted(1), publish=False)
    assert await cache.publish(held.values()) == {wanted(1).key: False}
    assert cache.stats()["put_keys"] == 0
    cache.release(held.values())


async def test_puts_that_cannot_keep_up_are_dropped() -> None:
    """What exceeds the queue is False at once, and counted."""
    store, encoder = FakeSlowStore(), FakeEncoder()
    cache = make_cache(store, max_queued_puts=1)
    held = await encoder.hold(cache, *map(wanted, (1, 2, 3)), publish=False)
    store.put_gate.clear()
    handles = list(held.values())
    running = [asyncio.create_task(cache.publish([handle])) for handle in handles[:1]]
    await asyncio.sleep(0)
    await until(store.put)
    running.append(asyncio.create_task(cache.publish([handles[1]])))
    await asyncio.sleep(0)
    assert await cache.publish([handles[2]]) == {wanted(3).key: False}
    assert cache.stats()["put_dropped"] == 1
    store.put_gate.set()
    assert await asyncio.gather(*running) == [{wanted(1).key: True}, {wanted(2).key: True}]
    cache.release(handles)
    cache.check_integrity()


async def test_an_entry_is_pinned_while_its_put_runs() -> None:
    """Released, and its put given up at the deadline, it still keeps its pages until the call has ended."""
    store, encoder = FakeSlowStore(), FakeEncoder()
    cache = make_cache(store, num_pages=2, timeout_s=0.01, pool_timeout_s=0.02)
    held = await encoder.hold(cache, wanted(1), publish=False)
    store.put_gate.clear()
    assert await cache.publish(held.values()) == {wanted(1).key: False}
    cache.release(held.values())
    assert (cache.stats()["pins"], cache.stats()["put_timeouts"], cache.stats()["puts_running"]) == (1, 1, 1)
    with pytest.raises(TimeoutError):
        await cache.acquire([wanted(2)], claim=True, ask_store=False)
    store.put_gate.set()
    await cache.close()
    assert cache.stats()["pins"] == 0
    assert list(store.objects) == [str(wanted(1).key)]
    cache.check_integrity()


async def test_publishing_an_entry_twice_at_once_puts_it_once() -> None:
    """The second publish waits for the first one's put."""
    store, encoder = FakeSlowStore(), FakeEncoder()
    cache = make_cache(store)
    held = await encoder.hold(cache, wanted(1), publish=False)
    store.put_gate.clear()
    publishing = [asyncio.create_task(cache.publish(held.values())) for _ in range(2)]
    await asyncio.sleep(0)
    await until(store.put)
    store.put_gate.set()
    assert await asyncio.gather(*publishing) == [{wanted(1).key: True}] * 2
    assert len(store.put_calls) == 1
    cache.release(held.values())
    await cache.close()


async def test_a_cancelled_publish_goes_on() -> None:
    """The put ends, its pin goes, and the rows are there for others."""
    store, encoder = FakeSlowStore(), FakeEncoder()
    cache = make_cache(store)
    held = await encoder.hold(cache, wanted(1), publish=False)
    store.put_gate.clear()
    publishing = asyncio.create_task(cache.publish(held.values()))
    await asyncio.sleep(0)
    await until(store.put)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    cache.release(held.values())
    assert cache.stats()["pins"] == 1
    store.put_gate.set()
    await cache.close()
    assert cache.stats()["pins"] == 0
    assert len(store.objects) == 1


async def test_a_cancelled_request_leaves_its_fetch_to_others() -> None:
    """Who joined gets the rows; nothing is fetched twice."""
    store, encoder = FakeSlowStore(), FakeEncoder()
    writer = make_cache(store)
    writer.release((await encoder.hold(writer, wanted(1))).values())
    store.got.clear()
    store.get_gate.clear()
    cache = make_cache(store)
    tasks = [asyncio.create_task(cache.acquire([wanted(1)], claim=True, ask_store=True)) for _ in range(2)]
    await asyncio.sleep(0)
    await until(store.got)
    tasks[0].cancel()
    await asyncio.sleep(0)
    store.get_gate.set()
    handles = (await tasks[1]).handles
    assert torch.equal(loaded(cache, list(handles.values())), rows_of(wanted(1)))
    assert (len(store.get_calls), cache.stats()["pins"]) == (2, 1)
    cache.release(handles.values())
    cache.check_integrity()


async def test_close_with_a_hung_get_ends_in_time_and_leaves_the_store_open() -> None:
    """Its waiters get CacheClosed; a store whose call still runs is not closed under it."""
    store = FakeSlowStore()
    store.get_gate.clear()
    cache = make_cache(store, timeout_s=0.01)
    waiting = asyncio.create_task(cache.acquire([wanted(1)], claim=True, ask_store=True))
    await asyncio.sleep(0)
    await until(store.got)
    await cache.close(timeout_s=0.05)
    with pytest.raises(CacheClosed):
        await waiting
    assert not store.is_closed
    assert cache.stats()["calls_hung"] == 1
    cache.check_integrity()
    store.get_gate.set()
