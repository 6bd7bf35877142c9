"""How a request gets what it needs: everything that can be had in one step, then waits for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from epd.cache.entries import Entry, EntryState, EntryTable
from epd.cache.errors import PoolBusy
from epd.cache.filling import FillBoard, Unfilled, Waiter
from epd.cache.handles import Acquired, FillTicket, Handle
from epd.cache.pressure import PressureQueue
from epd.cache.stats import CacheCounters
from epd.cache.store_io import StoreIO
from epd.cache.types import MediaKey, Wanted


@dataclass(slots=True, eq=False)
class Attempt:
    """What a request took in one step: rows and tickets at once, and waits for the rest."""

    acquired: Acquired = field(default_factory=Acquired)
    waits: dict[MediaKey, tuple[Entry, Waiter]] = field(default_factory=dict)
    num_local: int = 0


@dataclass(slots=True)
class Admission:
    """Requests in line for the pool, and what each takes when its turn has come."""

    table: EntryTable
    board: FillBoard
    queue: PressureQueue[Attempt]
    counters: CacheCounters
    io: StoreIO | None

    async def admit(
        self, requests: dict[MediaKey, Wanted], *, claim: bool, ask_store: bool
    ) -> Acquired | None:
        """What can be had; None, holding nothing, when what it waited for was given up with pages in use."""
        attempt = partial(self._attempt, requests, claim, ask_store)
        taken = self.queue.try_now(attempt)
        if taken is None:
            taken = await self._wait_for_room(attempt)
        if not await self._settle(taken):
            self.give_back(taken)
            return None
        self.counters.hits_local += taken.num_local
        self.counters.misses += len(taken.acquired.missing) + len(taken.acquired.tickets)
        return taken.acquired

    def give_back(self, taken: Attempt) -> None:
        """Lets go of all that a request took."""
        for entry, waiter in taken.waits.values():
            self.board.leave(entry, waiter)
        for handle in taken.acquired.handles.values():
            self.table.unpin(handle)
        for ticket in taken.acquired.tickets.values():
            self.board.abandon(ticket)

    def _attempt(self, requests: dict[MediaKey, Wanted], claim: bool, ask_store: bool) -> Attempt | None:
        """Takes everything that can be had at once; None, taking nothing, when there is no room for it."""
        ask = ask_store and self.io is not None
        found = {wanted: self.table.find(wanted) for wanted in requests.values()}
        ready = [entry for entry in found.values() if entry and entry.state is EntryState.READY]
        absent = [wanted for wanted, entry in found.items() if entry is None]
        if claim or ask:
            num_pages = sum(self.table.pool.pages_for(wanted.num_tokens) for wanted in absent)
            if not self.table.has_room(num_pages, sparing=ready):
                return None
        taken = Attempt(num_local=len(ready))
        for entry in ready:
            taken.acquired.handles[entry.wanted.key] = self.table.pin(entry)
        for wanted, other in found.items():
            if other and other.state is EntryState.FILLING:
                taken.waits[wanted.key] = (other, self.board.join(other, claim=claim, joined=True))
        if ask:
            fetched = [self.table.create(wanted) for wanted in absent]
            for entry in fetched:
                taken.waits[entry.wanted.key] = (entry, self.board.join(entry, claim=claim, joined=False))
            if fetched and self.io is not None:
                self.io.start_fetch(fetched)
        elif claim:
            for wanted in absent:
                taken.acquired.tickets[wanted.key] = self.board.claim(self.table.create(wanted))
        else:
            taken.acquired.missing.extend(wanted.key for wanted in absent)
        return taken

    async def _wait_for_room(self, attempt: Callable[[], Attempt | None]) -> Attempt:
        self.counters.pool_waits += 1
        try:
            return await self.queue.wait(attempt)
        except PoolBusy:
            self.counters.pool_timeouts += 1
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
            self.give_back(taken)
            raise
        return True
