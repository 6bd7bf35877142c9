"""The pages of a KV pool that one sequence holds while it is prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epd.cache.kv.prefix import PrefixCache
from epd.cache.kv.slots import SlotAllocator


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """slots: int64 `[T]`, where each token's keys and values live. cached_tokens: how many of the first
    are there already. shared: hashes of the pages it uses of the prefix cache; own: pages of its own.
    """

    slots: npt.NDArray[np.int64]
    cached_tokens: int
    shared: tuple[bytes, ...]
    own: tuple[int, ...]


class KVPages:
    """Leases over a pool's pages, with the pages of past prompts as what may be evicted.

    Not thread-safe: one owner.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._slots = SlotAllocator(num_pages)
        self._prefix = PrefixCache()
        self._leases: set[Lease] = set()

    def lease(self, num_tokens: int, hashes: Sequence[bytes] = ()) -> Lease | None:
        """Room for a sequence of `num_tokens`; None while others hold too much of it.

        hashes: of its full pages, to begin with what the prefix cache has. The last token is always
        left to run: where its page is cached too, it gets a slot apart, since cached pages are never
        written. Raises ValueError when the pool could never hold the sequence.
        """
        needed = -(-num_tokens // self.page_size)
        if needed > self._slots.num_pages:
            raise ValueError(f"{num_tokens} tokens need {needed} pages, the pool has {self._slots.num_pages}")
        pages = self._prefix.acquire(hashes)
        shared = tuple(hashes[: len(pages)])
        complete = len(pages) == needed
        own = self._allocate(1 if complete else needed - len(pages))
        if own is None and complete:  # no page to spare beside its own: run its last page again
            self._prefix.release(shared[-1:])
            shared, pages, complete = shared[:-1], pages[:-1], False
            own = self._allocate(1)
        if own is None:
            self._prefix.release(shared)
            return None
        slots = self._slots_of(pages if complete else [*pages, *own])[:num_tokens]
        if complete:
            slots[-1] = own[0] * self.page_size
        cached = min(len(pages) * self.page_size, num_tokens - 1)
        lease = Lease(slots, cached, shared, tuple(own))
        self._leases.add(lease)
        return lease

    def end(self, lease: Lease, hashes: Sequence[bytes] = ()) -> None:
        """Give a lease back. hashes: of the sequence's full pages, when all its tokens ran and its pages
        are to be kept for later prompts.
        """
        self._leases.remove(lease)
        self._prefix.release(lease.shared)
        fresh = hashes[len(lease.shared) :]
        spare = self._prefix.add(fresh, lease.own[: len(fresh)])
        self._prefix.touch(hashes)
        self._slots.free([*spare, *lease.own[len(fresh) :]])

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is free, cached or leased, exactly once."""
        own = [page for lease in self._leases for page in lease.own]
        assert len(set(own)) == len(own), "a page is leased twice"
        self._slots.check_integrity(held=len(own) + len(self._prefix))
        self._prefix.check_integrity(used=sum(len(lease.shared) for lease in self._leases))

    def stats(self) -> dict[str, int]:
        """Pages in all, free, and kept for later prompts; sequences that hold a lease."""
        return {
            "kv_pages": self._slots.num_pages,
            "kv_pages_free": self._slots.num_free,
            "kv_pages_cached": len(self._prefix),
            "kv_leases": len(self._leases),
        }

    def _allocate(self, num_pages: int) -> list[int] | None:
        lacking = num_pages - self._slots.num_free
        if 0 < lacking <= self._prefix.num_idle:
            self._slots.free(self._prefix.evict(lacking))
        return self._slots.allocate(num_pages)

    def _slots_of(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        first = np.asarray(pages, dtype=np.int64)[:, None] * self.page_size
        return (first + np.arange(self.page_size)).reshape(-1)
