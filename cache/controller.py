"""The embedding cache of one replica: rows by key, in a pool, in front of a store."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from epd.cache.breaker import BreakerState
from epd.cache.entries import Entry, EntryState, EntryTable
from epd.cache.errors import CacheClosed, PoolBusy, RequestTooLarge
from epd.cache.filling import FillBoard, Unfilled, Waiter
from epd.cache.handles import Acquired, FillTicket, Handle
from epd.cache.plans import device_to_host_plan, host_to_device_plan
from epd.cache.pool import PagePool
from epd.cache.pressure import PressureQueue
from epd.cache.rows import rows_to_numpy
from epd.cache.stats import CacheCounters
from epd.cache.store_io import StoreIO
from epd.cache.stores.base import Store
from epd.cache.types import MediaKey, Wanted
from epd.cache.workers import Job, MakeRunner, Workers
from epd.kernels.transfer import AsyncCopy, transfer_ranges

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Attempt:
    """What a request took in one step: rows and tickets at once, and waits for the rest."""

    acquired: Acquired = field(default_factory=Acquired)
    waits: dict[MediaKey, tuple[Entry, Waiter]] = field(default_factory=dict)
    num_local: int = 0


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
        inline_copy_bytes: int = 256 << 10,
        make_runner: MakeRunner = Workers,
    ) -> None:
        """Registers the pool with the store; both are this cache's from now on.

        timeout_s: of a store call, after which a request goes on without. pool_timeout_s: how long a request
        waits for pages. max_queued_gets, max_queued_puts: calls in line for a thread; what exceeds them
        is not fetched, and not stored. inline_copy_bytes: host rows up to this size are copied on the event
        loop, larger ones on a thread. make_runner: makes the threads.
        """
        self.pool = pool
        self._store = store
        self._counters = CacheCounters()
        self._queue: PressureQueue[Attempt] = PressureQueue(self._give_back, timeout_s=pool_timeout_s)
        self._table = EntryTable(pool, self._queue.wake, self._counters)
        self._board = FillBoard(self._table, self._counters)
        self._copies = make_runner("cache-copy", num_threads=1, max_queued=sys.maxsize)
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
                make_runner=make_runner,
            )
        self._stream: torch.cuda.Stream | None = None
        self._copying: set[Job[Any]] = set()
        self._releasing: set[Handle] = set()
        self._inline_copy_bytes = inline_copy_bytes
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
            attempt = partial(self._attempt, requests, claim, ask_store)
            taken = self._queue.try_now(attempt)
            if taken is None:
                taken = await self._wait_for_room(attempt)
            if await self._settle(taken):
                break
            self._give_back(taken)
            ask_store = False  # the pages it had are still being written: other pages, and no store
        self._counters.hits_local += taken.num_local
        self._counters.misses += len(taken.acquired.missing) + len(taken.acquired.tickets)
        return taken.acquired

    async def fill(self, ticket: FillTicket, rows: torch.Tensor) -> Handle:
        """Copies `rows` `[num_tokens, row_dim]`, on any device, to the pool; READY once the copy has ended.

        `rows` may come from work submitted to the device's current stream. Cancelling gives the entry up.
        Raises ValueError for rows of another shape or dtype (the ticket stays good) and for a ticket that
        is no longer good, RuntimeError when the device fails.
        """
        self._check_open()
        self._check_rows(ticket.wanted, rows)
        entry = self._board.take(ticket)
        plan = device_to_host_plan(entry.runs, self.pool.page_tokens, entry.wanted.num_tokens)
        copy = partial(
            transfer_ranges,
            rows,
            self.pool.rows,
            plan.src_starts,
            plan.dst_starts,
            plan.lengths,
            self._side_stream(rows),
        )
        job: Job[Any] | None = None
        try:
            if rows.is_cuda or rows.nbytes <= self._inline_copy_bytes:
                started = copy()
                job = None if started.done() else self._submit_copy(started.wait)
            else:
                job = self._submit_copy(copy)
            if job is not None:
                await asyncio.shield(job.future)
        except BaseException:
            self._counters.abandoned += 1
            self._fail_copy(entry, job)
            raise
        self._counters.fills += 1
        self._counters.fill_bytes += rows.nbytes
        self._board.ready(entry)
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
        places = ((h.runs, h.num_tokens, start) for h, start in zip(handles, dst_starts, strict=True))
        plan = host_to_device_plan(places, self.pool.page_tokens)
        if plan.is_empty:
            return AsyncCopy("copy_")
        copy = transfer_ranges(self.pool.rows, dst, plan.src_starts, plan.dst_starts, plan.lengths)
        if not copy.done():
            for handle in handles:
                handle.copies.append(copy)
        return copy

    def rows(self, handle: Handle) -> npt.NDArray[Any]:
        """A copy of its rows `[num_tokens, row_dim]`; bfloat16 as bits (see `epd.cache.rows`). Any thread."""
        self._check_live([handle])
        return rows_to_numpy(self.pool.copy_rows(handle.runs, handle.num_tokens))

    def release(self, handles: Iterable[Handle]) -> None:
        """Ends the pins; where a load still reads the rows, once it has. ValueError the second time."""
        for handle in handles:
            if handle in self._releasing:
                raise ValueError(f"the handle of {handle.key} was released before")
            running = [copy for copy in handle.copies if not copy.done()]
            if not running:
                self._table.unpin(handle)
                continue
            self._releasing.add(handle)
            job = self._submit_copy(partial(_wait_all, running))
            job.future.add_done_callback(partial(self._end_pin, handle))

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
        if self._copying:
            await asyncio.wait([job.future for job in self._copying], timeout=timeout_s)
        self._copies.close()
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

    def _attempt(self, requests: dict[MediaKey, Wanted], claim: bool, ask_store: bool) -> Attempt | None:
        """Takes everything that can be had at once; None, taking nothing, when there is no room for it."""
        ask = ask_store and self._io is not None
        found = {wanted: self._table.find(wanted) for wanted in requests.values()}
        ready = [entry for entry in found.values() if entry and entry.state is EntryState.READY]
        absent = [wanted for wanted, entry in found.items() if entry is None]
        if claim or ask:
            num_pages = sum(self.pool.pages_for(wanted.num_tokens) for wanted in absent)
            if not self._table.has_room(num_pages, sparing=ready):
                return None
        taken = Attempt(num_local=len(ready))
        for entry in ready:
            taken.acquired.handles[entry.wanted.key] = self._table.pin(entry)
        for wanted, other in found.items():
            if other and other.state is EntryState.FILLING:
                taken.waits[wanted.key] = (other, self._board.join(other, claim=claim, joined=True))
        if ask:
            fetched = [self._table.create(wanted) for wanted in absent]
            for entry in fetched:
                taken.waits[entry.wanted.key] = (entry, self._board.join(entry, claim=claim, joined=False))
            if fetched and self._io is not None:
                self._io.start_fetch(fetched)
        elif claim:
            for wanted in absent:
                taken.acquired.tickets[wanted.key] = self._board.claim(self._table.create(wanted))
        else:
            taken.acquired.missing.extend(wanted.key for wanted in absent)
        return taken

    async def _wait_for_room(self, attempt: Callable[[], Attempt | None]) -> Attempt:
        self._counters.pool_waits += 1
        try:
            return await self._queue.wait(attempt)
        except PoolBusy:
            self._counters.pool_timeouts += 1
            raise

    async def _settle(self, taken: Attempt) -> bool:
        """Waits for what is on its way. False when the request has to start anew."""
        acquired = taken.acquired
        try:
            while taken.waits:
                key, (_, waiter) = next(iter(taken.waits.items()))
                result = await waiter.future
                del taken.waits[key]
                match result:
                    case Handle():
                        acquired.handles[key] = result
                    case FillTicket():
                        acquired.tickets[key] = result
                    case Unfilled.MISSING:
                        acquired.missing.append(key)
                    case Unfilled.GONE:
                        return False
        except BaseException:
            self._give_back(taken)
            raise
        return True

    def _give_back(self, taken: Attempt) -> None:
        """Lets go of all that a request took."""
        for entry, waiter in taken.waits.values():
            self._board.leave(entry, waiter)
        for handle in taken.acquired.handles.values():
            self._table.unpin(handle)
        self.abandon(taken.acquired.tickets.values())

    def _side_stream(self, rows: torch.Tensor) -> torch.cuda.Stream | None:
        """A stream beside the device's compute, behind what made `rows`: the legacy default stream has no
        batched copy.
        """
        if not rows.is_cuda:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        return self._stream

    def _submit_copy(self, call: Any) -> Job[Any]:
        job = self._copies.submit(call)
        assert job is not None, "copies are never refused"
        self._copying.add(job)
        job.future.add_done_callback(lambda _: self._copying.discard(job))
        return job

    def _fail_copy(self, entry: Entry, job: Job[Any] | None) -> None:
        """Gives up an entry whose fill failed; its pages drain while the copy still writes them."""
        if job is None or job.future.done() or self._copies.give_up(job):
            self._board.fail(entry)
        else:
            self._board.fail(entry, draining=True)
            job.future.add_done_callback(lambda _: self._table.drained(entry))

    def _end_pin(self, handle: Handle, ended: asyncio.Future[Any]) -> None:
        ended.exception()
        self._releasing.remove(handle)
        self._table.unpin(handle)

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


def _wait_all(copies: Sequence[AsyncCopy]) -> None:
    for copy in copies:
        copy.wait()
