"""The embedding cache of one replica: rows by key, in a pool, in front of a store."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import numpy.typing as npt
import torch

from epd.cache.admission import Admission, Attempt
from epd.cache.breaker import BreakerState
from epd.cache.copies import PoolCopies
from epd.cache.entries import Entry, EntryTable
from epd.cache.errors import CacheClosed, RequestTooLarge
from epd.cache.filling import FillBoard
from epd.cache.handles import Acquired, FillTicket, Handle
from epd.cache.pool import PagePool
from epd.cache.pressure import PressureQueue
from epd.cache.rows import rows_to_numpy
from epd.cache.stats import CacheCounters
from epd.cache.store_io import StoreIO
from epd.cache.stores.base import Store
from epd.cache.types import MediaKey, Wanted
from epd.cache.workers import MakeRunner, Workers
from epd.kernels.transfer import AsyncCopy

logger = logging.getLogger(__name__)


class EmbeddingCache:
    """Owned by one event loop, on which every method is called; any thread may call `load` and `rows`.

    Rows are made once: who asks for what another is filling or fetching waits for that. A request that has
    to wait for pages holds nothing meanwhile, so callers must not either: release
    handles and tickets before the next `acquire`.
    """

    def __init__(
        self,
        pool: PagePool,
        store: Store | None,
        *,
        timeout_s: float = 2.0,
        pool_timeout_s: float = 30.0,
        get_threads: int = 2,
        put_threads: int = 1,
        max_queued_gets: int = 64,
        max_queued_puts: int = 16,
        inline_copy_bytes: int = 1 << 20,
        make_runner: MakeRunner = Workers,
    ) -> None:
        """Registers the pool with the store; both are this cache's from now on.

        timeout_s: of a store call, after which a request goes on without. pool_timeout_s: how long a request
        waits for pages. max_queued_gets, max_queued_puts: calls in line for a thread; what exceeds them
        is not fetched, and not stored. inline_copy_bytes: rows up to this size are copied from the host, and
        read from its memory, on the event loop, larger ones on a thread. make_runner: makes the threads.
        """
        self.pool = pool
        self._store = store
        self._counters = CacheCounters()
        self._queue: PressureQueue[Attempt] = PressureQueue(self._give_back, timeout_s=pool_timeout_s)
        self._table = EntryTable(pool, self._queue.wake, self._counters)
        self._board = FillBoard(self._table, self._counters)
        runner = make_runner("cache-copy", num_threads=1, max_queued=sys.maxsize)
        self._copies = PoolCopies(self._table, self._board, runner, inline_copy_bytes=inline_copy_bytes)
        self._io: StoreIO | None = None
        if store is not None:
            store.register(pool.memory)
            self._io = StoreIO(
                store,
                self._table,
                self._board,
                self._counters,
                timeout_s=timeout_s,
                get_threads=get_threads,
                put_threads=put_threads,
                max_queued_gets=max_queued_gets,
                max_queued_puts=max_queued_puts,
                inline_copy_bytes=inline_copy_bytes,
                make_runner=make_runner,
            )
        self._admission = Admission(self._table, self._board, self._queue, self._counters, self._io)
        self._is_closed = False

    async def acquire(self, wanted: Sequence[Wanted], *, claim: bool, ask_store: bool) -> Acquired:
        """Pins what is there or on its way, and says what has to be made.

        Duplicates collapse. What is not in the pool is joined when another fills it, else, with
        `ask_store`, read from the store; what is left is `missing`, or with `claim` comes as tickets: this
        caller fills or abandons them, and others wait for it. Safe to cancel.

        Raises RequestTooLarge when the pool can never hold it all, PoolBusy when it had no room in time,
        ValueError for a key with two grids, CacheClosed.
        """
        requests = self._checked(wanted)
        while True:
            self._check_open()
            acquired = await self._admission.admit(requests, claim=claim, ask_store=ask_store)
            if acquired is not None:
                return acquired
            ask_store = False  # it has just been too slow, and the pages are still being written

    async def fill(self, ticket: FillTicket, rows: torch.Tensor) -> Handle:
        """Copies `rows` `[num_tokens, row_dim]`, on any device, to the pool; READY once the copy has ended.

        `rows` may come from work submitted to the device's current stream. Cancelling gives the entry up.
        Raises ValueError for rows of another shape or dtype (the ticket stays good) and for a ticket that
        is no longer good, RuntimeError when the device fails.
        """
        self._check_open()
        self._check_rows(ticket.wanted, rows)
        entry = self._board.take(ticket)
        try:
            await self._copies.fill(entry, rows)
        except BaseException:
            self._counters.abandoned += 1
            raise
        self._counters.fills += 1
        self._counters.fill_bytes += rows.nbytes
        return self._table.pin(entry)

    async def publish(self, handles: Iterable[Handle]) -> dict[MediaKey, bool]:
        """Puts rows into the store; says of each key whether others can read it there now.

        Never raises for trouble with the store: such keys are False, and counted.
        """
        entries = {handle.key: self._table.entry_of(handle) for handle in handles}
        stored: set[Entry] = set()
        if self._io is not None and not self._is_closed:
            stored = await self._io.publish([entry for entry in entries.values() if entry is not None])
        return {key: entry in stored for key, entry in entries.items()}

    def load(self, handles: Sequence[Handle], dst: torch.Tensor, dst_starts: Sequence[int]) -> AsyncCopy:
        """Copies each handle's rows to `dst` `[V, row_dim]`, from row `dst_starts[i]` on. Any thread.

        On a CUDA `dst` it goes on its current stream. Handles may be released before it is done.
        Raises ValueError when rows would not fit, and for handles that were released.
        """
        if len(handles) != len(dst_starts):
            raise ValueError(f"{len(handles)} handles were given {len(dst_starts)} destinations")
        self._check_live(handles)
        return self._copies.load(handles, dst, dst_starts)

    def rows(self, handle: Handle) -> npt.NDArray[Any]:
        """A copy of its rows `[num_tokens, row_dim]`; bfloat16 as bits (see `epd.cache.rows`). Any thread."""
        self._check_live([handle])
        return rows_to_numpy(self.pool.copy_rows(handle.runs, handle.num_tokens))

    def release(self, handles: Iterable[Handle]) -> None:
        """Ends the pins; where a load still reads the rows, once it has. ValueError the second time."""
        for handle in handles:
            self._copies.unpin(handle)

    def abandon(self, tickets: Iterable[FillTicket]) -> None:
        """Lets others make these rows. Tickets that were filled or abandoned before are passed over."""
        for ticket in tickets:
            self._board.abandon(ticket)

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """Ends every wait with CacheClosed, then waits, at most so long, for calls and copies that run.

        The store is closed unless a call of it still runs. Handles stay good until they are released.
        """
        if self._is_closed:
            return
        self._is_closed = True
        error = CacheClosed("the embedding cache was closed")
        self._queue.fail_all(error)
        self._board.close(error)
        await self._copies.close(timeout_s)
        if self._io is None or self._store is None:
            return
        if await self._io.close(timeout_s):
            await asyncio.to_thread(self._store.close)
        else:
            logger.error("the store is left open: calls of it still run after %s s", timeout_s)

    def stats(self) -> dict[str, int]:
        """Counters and levels; see `epd.cache.stats`."""
        table = self._table
        return {
            **asdict(self._counters),
            "pages": self.pool.num_pages,
            "pages_free": table.num_free,
            "pages_draining": table.num_draining,
            "entries": table.num_entries,
            "filling": table.num_filling,
            "pins": table.num_pins,
            "waiting": len(self._queue),
            "puts_running": self._io.num_puts if self._io else 0,
            "calls_hung": self._io.num_hung if self._io else 0,
            "breaker_state": int(BreakerState.CLOSED),
            **(self._store.stats() if self._store else {}),
        }

    def check_integrity(self) -> None:
        """Raises RuntimeError, with numbers, unless every page and every pin has one owner."""
        self._table.check_integrity()

    def _give_back(self, taken: Attempt) -> None:
        self._admission.give_back(taken)

    def _checked(self, wanted: Sequence[Wanted]) -> dict[MediaKey, Wanted]:
        requests: dict[MediaKey, Wanted] = {}
        for item in wanted:
            if requests.setdefault(item.key, item) != item:
                raise ValueError(f"{item.key} is wanted as {requests[item.key].grid} and as {item.grid}")
        num_pages = sum(self.pool.pages_for(item.num_tokens) for item in requests.values())
        if num_pages > self.pool.num_pages:
            raise RequestTooLarge(num_pages, self.pool.num_pages, self.pool.page_tokens)
        return requests

    def _check_rows(self, wanted: Wanted, rows: torch.Tensor) -> None:
        layout = self.pool.layout
        if tuple(rows.shape) != (wanted.num_tokens, layout.row_dim) or rows.dtype is not layout.dtype:
            raise ValueError(
                f"{wanted.key} needs rows [{wanted.num_tokens}, {layout.row_dim}] of {layout.dtype}, "
                f"got {list(rows.shape)} of {rows.dtype}"
            )

    def _check_live(self, handles: Iterable[Handle]) -> None:
        for handle in handles:
            if self._table.entry_of(handle) is None:
                raise ValueError(f"the handle of {handle.key} was released before")

    def _check_open(self) -> None:
        if self._is_closed:
            raise CacheClosed("the embedding cache is closed")
