"""What tests of the cache share: a small pool, keys by number, rows that tell whose they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epd.cache.controller import EmbeddingCache
from epd.cache.handles import Handle
from epd.cache.keys import media_key
from epd.cache.pool import PagePool
from epd.cache.stores.base import Store
from epd.cache.types import MediaGrid, RowLayout, Wanted
from tests.memory import resident

LAYOUT = RowLayout(row_dim=8, dtype=torch.float32)
PAGE_TOKENS = 2


def wanted(number: int, num_tokens: int = 3) -> Wanted:
    """Picture `number`, of `num_tokens` rows (2 pages by default)."""
    key = media_key("test", f"picture {number}".encode())
    return Wanted(key, MediaGrid(1, 2, 2 * num_tokens), num_tokens)


def rows_of(item: Wanted, layout: RowLayout = LAYOUT) -> torch.Tensor:
    """The rows that an encoder would make of it: the same for equal keys, different for others."""
    seed = int(item.key.digest[:12], 16)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(item.num_tokens, layout.row_dim, generator=generator).to(layout.dtype)


def make_cache(store: Store | None = None, *, num_pages: int = 12, **knobs: Any) -> EmbeddingCache:
    """A cache over `num_pages` pages of 2 tokens."""
    return EmbeddingCache(PagePool(LAYOUT, PAGE_TOKENS, num_pages, pin=False), store, **knobs)


class FakeEncoder:
    """Makes rows for tickets, and counts them."""

    def __init__(self, rows: Callable[[Wanted], torch.Tensor] = rows_of) -> None:
        self.rows = rows
        self.num_encoded = 0

    async def hold(
        self, cache: EmbeddingCache, *items: Wanted, ask_store: bool = True, publish: bool = True
    ) -> dict[Wanted, Handle]:
        """Handles of all of them, encoding what is not there."""
        acquired = await cache.acquire(items, claim=True, ask_store=ask_store)
        fresh = []
        for key, ticket in acquired.tickets.items():
            self.num_encoded += 1
            handle = await cache.fill(ticket, self.rows(ticket.wanted))
            acquired.handles[key] = handle
            fresh.append(handle)
        if publish and fresh:
            await cache.publish(fresh)
        return {item: acquired.handles[item.key] for item in items}


def loaded(cache: EmbeddingCache, handles: list[Handle]) -> torch.Tensor:
    """Their rows in one tensor, in order, through `load`."""
    starts = [sum(h.num_tokens for h in handles[:i]) for i in range(len(handles))]
    total = sum(h.num_tokens for h in handles)
    dst = torch.zeros(total, cache.pool.layout.row_dim, dtype=cache.pool.layout.dtype)
    cache.load(handles, dst, starts).wait()
    return dst


async def soak(store: Store, count: int, most_growth: int) -> None:
    """`count` distinct entries through a small pool; memory after the second half is as after the first."""
    cache, encoder = make_cache(store, num_pages=64), FakeEncoder()
    levels = []
    for half in range(2):
        for number in range(half * count // 2, (half + 1) * count // 2, 4):
            items = map(wanted, range(number, number + 4))
            cache.release((await encoder.hold(cache, *items)).values())
        levels.append(resident())
    assert encoder.num_encoded == count
    assert levels[1] - levels[0] < most_growth
    cache.check_integrity()
    assert cache.stats()["evictions"] >= count - 32
    assert cache.stats()["pins"] == 0
    await cache.close()
