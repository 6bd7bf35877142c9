"""Many entries and real threads: nothing grows, nothing is lost, no row is another's."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
import torch

from epd.cache.controller import EmbeddingCache
from epd.cache.pool import PagePool
from epd.cache.stores.shared_memory import SharedMemoryStore
from tests.cache.fakes import FakeStore
from tests.cache.tools import LAYOUT, FakeEncoder, loaded, rows_of, soak, wanted


async def test_many_entries_leave_memory_flat(tmp_path: Path) -> None:
    """The short form: 2,000 entries through pool and files."""
    await soak(SharedMemoryStore("a", 1 << 20, parent=tmp_path), 2_000, most_growth=2 << 20)


@pytest.mark.long
async def test_very_many_entries_leave_memory_flat(tmp_path: Path) -> None:
    """20,000 distinct small entries through pool and files."""
    await soak(SharedMemoryStore("a", 1 << 20, parent=tmp_path), 20_000, most_growth=1 << 20)


class FakeErraticStore(FakeStore):
    """Real threads; some calls are slow beyond the deadline and write late, some fail."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.on_get = self.on_put = self.stall

    def stall(self) -> None:
        self.is_failing = self.random.random() < 0.1
        time.sleep(self.random.choice([0.0, 0.0, 0.001, 0.02]))


@pytest.mark.parametrize("seed", range(3))
async def test_late_calls_never_write_into_others_rows(seed: int) -> None:
    """Under cancellations, and a store that answers after its deadline, who gets rows gets its own."""
    store, encoder = FakeErraticStore(seed), FakeEncoder()
    pool = PagePool(LAYOUT, 2, 24, pin=False)
    cache = EmbeddingCache(pool, store, timeout_s=0.01, inline_copy_bytes=0)
    chance = random.Random(seed)
    checked = 0

    async def request(*numbers: int) -> None:
        nonlocal checked
        items = [wanted(number) for number in numbers]
        acquired = await cache.acquire(items, claim=True, ask_store=True)
        handles = list(acquired.handles.values())
        try:
            for ticket in acquired.tickets.values():
                handles.append(await cache.fill(ticket, encoder.rows(ticket.wanted)))
            await cache.publish(handles)
            expected = torch.cat([rows_of(handle.wanted) for handle in handles])
            assert torch.equal(loaded(cache, handles), expected)
            checked += 1
        finally:
            cache.release(handles)
            cache.abandon(acquired.tickets.values())

    for _ in range(40):
        tasks = [asyncio.create_task(request(*chance.sample(range(20), 3))) for _ in range(8)]
        await asyncio.wait(tasks, timeout=chance.choice([0.001, 0.01]))
        for task in chance.sample(tasks, 3):
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [error for error in ended if isinstance(error, Exception)]
        cache.check_integrity()
    await cache.close()
    cache.check_integrity()
    stats = cache.stats()
    assert checked > 100
    assert stats["get_timeouts"] > 0
    assert (stats["pins"], stats["pages_draining"], stats["filling"]) == (0, 0, 0)
