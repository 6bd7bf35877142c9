"""Moves entries between the pool and a store. Runs on worker threads, touches nothing but pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from epd.cache.entry import EntryHeader, rows_checksum, verify
from epd.cache.pool import PagePool
from epd.cache.stores.base import GetResult, PutResult, Store
from epd.cache.types import PageRun, Wanted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """What is wanted, and the pages it has. They are the caller's until the call ends."""

    wanted: Wanted
    runs: tuple[PageRun, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a read went. `problem`: what was wrong with an object that was read; such a read is no hit."""

    result: GetResult
    problem: str | None = None

    @property
    def is_hit(self) -> bool:
        return self.result.is_hit and self.problem is None


def fetch(store: Store, pool: PagePool, places: Sequence[Place]) -> list[Fetched]:
    """Reads each place's object into its pages, in one call, and verifies it. Damaged ones are removed."""
    keys = [str(place.wanted.key) for place in places]
    results = store.get_into(keys, [_buffers(pool, place) for place in places])
    fetched = [_checked(pool, place, result) for place, result in zip(places, results, strict=True)]
    damaged = [key for key, item in zip(keys, fetched, strict=True) if item.problem is not None]
    if damaged:
        logger.warning("removing %d damaged objects from the store: %s", len(damaged), damaged)
        store.remove(damaged)
    return fetched


def put(store: Store, pool: PagePool, places: Sequence[Place]) -> list[PutResult]:
    """Writes each place's header, and its object to the store, in one call."""
    for place in places:
        checksum = rows_checksum(pool.row_buffers(place.runs, place.wanted.num_tokens))
        pool.write_header(place.runs, EntryHeader.of(place.wanted, pool.layout, checksum).encode())
    keys = [str(place.wanted.key) for place in places]
    return store.put_from(keys, [_buffers(pool, place) for place in places])


def _buffers(pool: PagePool, place: Place) -> list[tuple[int, int]]:
    return [pool.header_buffer(place.runs), *pool.row_buffers(place.runs, place.wanted.num_tokens)]


def _checked(pool: PagePool, place: Place, result: GetResult) -> Fetched:
    if result is GetResult.WRONG_SIZE:
        return Fetched(result, "size")
    if not result.is_hit:
        return Fetched(result)
    rows = pool.row_buffers(place.runs, place.wanted.num_tokens)
    return Fetched(result, verify(pool.read_header(place.runs), rows, place.wanted, pool.layout))
