"""The cache as a caller sees it: hits of every tier, misses, sharing, and the rows that come out."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest
import torch

from epd.cache.errors import CacheClosed, PoolBusy, RequestTooLarge
from epd.cache.types import MediaGrid, Wanted
from epd.kernels.transfer import AsyncCopy
from tests.cache.fakes import FakeStore
from tests.cache.tools import FakeEncoder, loaded, make_cache, rows_of, wanted


async def test_filled_rows_are_hit_and_loaded_bit_equal() -> None:
    """What was filled comes back from the pool, at the row asked for, bit for bit."""
    cache, encoder = make_cache(), FakeEncoder()
    cache.release((await encoder.hold(cache, wanted(1), wanted(2))).values())
    hit = await cache.acquire([wanted(2), wanted(1)], claim=False, ask_store=False)
    handles = [hit.handles[wanted(i).key] for i in (2, 1)]
    assert torch.equal(loaded(cache, handles), torch.cat([rows_of(wanted(2)), rows_of(wanted(1))]))
    assert torch.equal(torch.from_numpy(cache.rows(handles[0])), rows_of(wanted(2)))
    assert (cache.stats()["hits_local"], cache.stats()["fills"]) == (2, 2)
    cache.release(handles)
    cache.check_integrity()


async def test_one_request_over_every_tier() -> None:
    """Of a local image, a stored one, an evicted one and a new one, only what is nowhere is encoded."""
    store, encoder = FakeStore(), FakeEncoder()
    other = make_cache(store)
    other.release((await encoder.hold(other, wanted(2))).values())
    cache = make_cache(store, num_pages=8)
    cache.release(
        (await encoder.hold(cache, wanted(3), publish=False)).values()
    )  # will be evicted, not stored
    cache.release((await encoder.hold(cache, *map(wanted, (10, 11, 12)))).values())
    cache.release((await encoder.hold(cache, wanted(1), publish=False)).values())
    assert cache.stats()["evictions"] == 1
    encoder.num_encoded = 0
    items = [wanted(i) for i in (1, 2, 3, 4)]
    held = await encoder.hold(cache, *items)
    assert encoder.num_encoded == 2
    stats = cache.stats()
    assert (stats["hits_local"], stats["hits_store"], stats["misses"]) == (1, 1, 2 + 5)
    assert torch.equal(loaded(cache, list(held.values())), torch.cat([rows_of(i) for i in items]))
    cache.release(held.values())
    cache.check_integrity()


async def test_the_same_image_twice_in_one_request_is_one_handle() -> None:
    """Duplicates collapse: one ticket, one get, one pin, and both places of the batch get the rows."""
    store, encoder = FakeStore(), FakeEncoder()
    cache = make_cache(store)
    held = await encoder.hold(cache, wanted(1), wanted(1))
    assert (encoder.num_encoded, cache.stats()["pins"], len(store.get_calls[0])) == (1, 1, 1)
    handle = held[wanted(1)]
    assert torch.equal(loaded(cache, [handle, handle]), rows_of(wanted(1)).repeat(2, 1))
    cache.release([handle])
    cache.check_integrity()


async def test_adjacent_images_and_their_swap() -> None:
    """Two neighbours in the pool, loaded in one order and in the other, each land at their own rows."""
    cache, encoder = make_cache(num_pages=4), FakeEncoder()
    held = list((await encoder.hold(cache, wanted(1, 4), wanted(2, 4))).values())
    assert torch.equal(loaded(cache, held), torch.cat([rows_of(wanted(1, 4)), rows_of(wanted(2, 4))]))
    assert torch.equal(loaded(cache, held[::-1]), torch.cat([rows_of(wanted(2, 4)), rows_of(wanted(1, 4))]))
    cache.release(held)
    cache.check_integrity()


async def test_many_requests_encode_each_image_once() -> None:
    """64 requests over 8 images, with room for 6 and a store behind: 8 encodes, and every vector its own."""
    store, encoder = FakeStore(), FakeEncoder()
    cache = make_cache(store, num_pages=6 * 2)

    async def request(number: int) -> None:
        items = [wanted(number % 8), wanted((number * 3 + 1) % 8)]
        held = await encoder.hold(cache, *items)
        await asyncio.sleep(0)
        assert torch.equal(loaded(cache, [held[i] for i in items]), torch.cat([rows_of(i) for i in items]))
        cache.release(held.values())

    await asyncio.gather(*(request(number) for number in range(64)))
    assert encoder.num_encoded == 8
    assert cache.stats()["evictions"] > 0
    cache.check_integrity()


async def test_without_claim_what_is_nowhere_is_missing() -> None:
    """A request that does not claim is told what is missing, holds no page, and asked the store once."""
    store = FakeStore()
    cache = make_cache(store)
    acquired = await cache.acquire([wanted(1), wanted(2)], claim=False, ask_store=True)
    assert acquired.missing == [wanted(1).key, wanted(2).key]
    assert not acquired.handles
    assert [len(call) for call in store.get_calls] == [2]
    assert cache.stats()["pages_free"] == 12
    cache.check_integrity()


async def test_the_store_is_not_asked_unless_told() -> None:
    """With ask_store off a stored image is missing."""
    store, encoder = FakeStore(), FakeEncoder()
    other = make_cache(store)
    other.release((await encoder.hold(other, wanted(1))).values())
    cache = make_cache(store)
    acquired = await cache.acquire([wanted(1)], claim=False, ask_store=False)
    assert acquired.missing == [wanted(1).key]
    assert len(store.get_calls) == 1


async def test_joined_requests_wait_for_one_fill() -> None:
    """Who asks for what another is filling gets its rows, without a ticket and without asking the store."""
    store = FakeStore()
    cache = make_cache(store)
    first = await cache.acquire([wanted(1)], claim=True, ask_store=True)
    joined = [asyncio.create_task(cache.acquire([wanted(1)], claim=c, ask_store=True)) for c in (True, False)]
    await asyncio.sleep(0)
    handle = await cache.fill(first.tickets[wanted(1).key], rows_of(wanted(1)))
    others = [(await task).handles[wanted(1).key] for task in joined]
    assert len(store.get_calls) == 1
    assert (cache.stats()["hits_joined"], cache.stats()["pins"]) == (2, 3)
    cache.release([handle, *others])
    cache.check_integrity()


async def test_after_an_abandoned_fill_exactly_one_waiter_takes_over() -> None:
    """The first waiter that claims gets the ticket, the next waits on, one that does not is told missing."""
    cache = make_cache()
    first = await cache.acquire([wanted(1)], claim=True, ask_store=False)
    tasks = [
        asyncio.create_task(cache.acquire([wanted(1)], claim=claim, ask_store=False))
        for claim in (False, True, True)
    ]
    await asyncio.sleep(0)
    cache.abandon(first.tickets.values())
    assert (await tasks[0]).missing == [wanted(1).key]
    second = await tasks[1]
    assert not tasks[2].done()
    handle = await cache.fill(second.tickets[wanted(1).key], rows_of(wanted(1)))
    third = (await tasks[2]).handles[wanted(1).key]
    cache.release([handle, third])
    cache.check_integrity()


async def test_a_lost_ticket_counts_as_abandoned() -> None:
    """A claimer that dies without a word wakes who waits for it."""
    cache = make_cache()
    first = await cache.acquire([wanted(1)], claim=True, ask_store=False)
    waiting = asyncio.create_task(cache.acquire([wanted(1)], claim=True, ask_store=False))
    await asyncio.sleep(0)
    del first
    second = await waiting
    assert list(second.tickets) == [wanted(1).key]
    assert cache.stats()["abandoned"] == 1
    cache.abandon(second.tickets.values())
    cache.check_integrity()


async def test_a_request_that_can_never_fit_is_refused_before_any_work() -> None:
    """The error names both sizes; nothing was asked, taken or evicted."""
    store = FakeStore()
    cache = make_cache(store, num_pages=4)
    with pytest.raises(RequestTooLarge, match=r"5 pages of 2 tokens, the pool has 4"):
        await cache.acquire([wanted(1, 6), wanted(2, 3)], claim=True, ask_store=True)
    assert not store.get_calls
    assert cache.stats()["pages_free"] == 4


async def test_two_requests_that_each_need_most_of_the_pool_both_finish() -> None:
    """Pages of a request are taken all at once, so neither can hold what the other waits for."""
    cache, encoder = make_cache(num_pages=10), FakeEncoder()

    async def request(*numbers: int) -> None:
        held = await encoder.hold(cache, *map(wanted, numbers), publish=False)
        await asyncio.sleep(0)
        cache.release(held.values())

    await asyncio.gather(request(1, 2, 3, 4), request(5, 6, 7, 8))
    assert cache.stats()["pool_waits"] == 1
    cache.check_integrity()


async def test_waiting_requests_are_served_in_order() -> None:
    """A small request that came later does not pass a large one that waits for room."""
    cache, encoder = make_cache(num_pages=4), FakeEncoder()
    held = await encoder.hold(cache, wanted(1), publish=False)
    order: list[str] = []

    async def request(name: str, *numbers: int) -> None:
        inner = await encoder.hold(cache, *map(wanted, numbers), publish=False)
        order.append(name)
        cache.release(inner.values())

    tasks = [asyncio.create_task(request("large", 2, 3)), asyncio.create_task(request("small", 4))]
    await asyncio.sleep(0)
    assert cache.stats()["waiting"] == 2
    cache.release(held.values())
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]
    cache.check_integrity()


async def test_no_room_in_time_is_an_error_that_holds_nothing() -> None:
    """PoolBusy comes after the deadline, and the queue and the pool are as before."""
    cache, encoder = make_cache(num_pages=4, pool_timeout_s=0.01), FakeEncoder()
    held = await encoder.hold(cache, wanted(1), publish=False)
    with pytest.raises(PoolBusy):
        await cache.acquire([wanted(2), wanted(3)], claim=True, ask_store=False)
    assert (cache.stats()["waiting"], cache.stats()["pool_timeouts"], cache.stats()["pages_free"]) == (
        0,
        1,
        2,
    )
    cache.release(held.values())
    cache.check_integrity()


async def test_two_grids_of_one_key_never_share_rows() -> None:
    """Within a request that is the caller's mistake; between requests it is a miss."""
    cache, encoder = make_cache(), FakeEncoder()
    item = wanted(1)
    turned = Wanted(item.key, MediaGrid(1, 6, 2), 3)
    with pytest.raises(ValueError, match="is wanted as"):
        await cache.acquire([item, turned], claim=True, ask_store=False)
    cache.release((await encoder.hold(cache, item)).values())
    acquired = await cache.acquire([turned], claim=False, ask_store=False)
    assert acquired.missing == [item.key]


@pytest.mark.parametrize(
    "rows", [torch.zeros(2, 8), torch.zeros(3, 4), torch.zeros(3, 8, dtype=torch.bfloat16)], ids=str
)
async def test_rows_of_another_shape_are_refused_and_the_ticket_stays_good(rows: torch.Tensor) -> None:
    """A fill with wrong rows is the caller's mistake; the right ones may follow."""
    cache = make_cache()
    ticket = (await cache.acquire([wanted(1)], claim=True, ask_store=False)).tickets[wanted(1).key]
    with pytest.raises(ValueError, match="needs rows"):
        await cache.fill(ticket, rows)
    cache.release([await cache.fill(ticket, rows_of(wanted(1)))])
    with pytest.raises(ValueError, match="filled, abandoned or closed before"):
        await cache.fill(ticket, rows_of(wanted(1)))
    cache.check_integrity()


async def test_a_handle_is_released_once() -> None:
    """The second release, and a load after the first, are the caller's mistake."""
    cache, encoder = make_cache(), FakeEncoder()
    handle = (await encoder.hold(cache, wanted(1)))[wanted(1)]
    cache.release([handle])
    with pytest.raises(ValueError, match="released before"):
        cache.release([handle])
    with pytest.raises(ValueError, match="released before"):
        cache.load([handle], torch.zeros(3, 8), [0])


async def test_the_least_recently_used_goes_first() -> None:
    """Of two idle entries the one whose last use is longer ago is evicted."""
    cache, encoder = make_cache(num_pages=4), FakeEncoder()
    for number in (1, 2, 1, 3):
        cache.release((await encoder.hold(cache, wanted(number), publish=False)).values())
    acquired = await cache.acquire([wanted(1), wanted(2)], claim=False, ask_store=False)
    assert list(acquired.handles) == [wanted(1).key]
    cache.release(acquired.handles.values())


async def test_close_ends_waits_and_refuses_new_work() -> None:
    """Requests in line and those that joined a fill get CacheClosed; the store is closed."""
    store = FakeStore()
    cache = make_cache(store, num_pages=2)
    first = await cache.acquire([wanted(1)], claim=True, ask_store=False)
    tasks = [asyncio.create_task(cache.acquire([wanted(i)], claim=True, ask_store=False)) for i in (1, 2)]
    await asyncio.sleep(0)
    await cache.close()
    for task in tasks:
        with pytest.raises(CacheClosed):
            await task
    with pytest.raises(CacheClosed):
        await cache.fill(first.tickets[wanted(1).key], rows_of(wanted(1)))
    with pytest.raises(CacheClosed):
        await cache.acquire([wanted(3)], claim=False, ask_store=False)
    await cache.close()
    assert store.is_closed
    assert cache.stats()["pages_free"] == 2
    cache.check_integrity()


class FakeCopyEvent:
    """A device's copy that ends when told."""

    def __init__(self) -> None:
        self.gate = Event()

    def query(self) -> bool:
        return self.gate.is_set()

    def synchronize(self) -> None:
        self.gate.wait()


async def test_a_released_entry_stays_until_its_load_has_ended() -> None:
    """While the device still reads the rows their pages are pinned; then they can be had."""
    cache, encoder = make_cache(num_pages=2), FakeEncoder()
    handle = (await encoder.hold(cache, wanted(1)))[wanted(1)]
    event = FakeCopyEvent()
    handle.copies.append(AsyncCopy("batch", event))
    cache.release([handle])
    assert cache.stats()["pins"] == 1
    with pytest.raises(ValueError, match="released before"):
        cache.release([handle])
    other = asyncio.create_task(cache.acquire([wanted(2)], claim=True, ask_store=False))
    await asyncio.sleep(0)
    assert cache.stats()["waiting"] == 1
    event.gate.set()
    cache.abandon((await other).tickets.values())
    assert (cache.stats()["pins"], cache.stats()["pages_free"]) == (0, 2)
    cache.check_integrity()
