"""Who fills an entry, who waits for it, and who takes over when it is given up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from weakref import ref

from epd.cache.entries import Entry, EntryTable
from epd.cache.handles import FillTicket, Handle
from epd.cache.stats import CacheCounters


class Unfilled(Enum):
    """Why a wait ended without rows."""

    MISSING = auto()
    """Nobody makes them, and this request said that it would not."""
    GONE = auto()
    """Given up with its pages still being written: ask again, for other pages."""


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """One request that waits for one entry. `claim`: it would fill it itself. `joined`: another began it."""

    claim: bool
    joined: bool
    future: asyncio.Future[Handle | FillTicket | Unfilled]


class FillBoard:
    """For each FILLING entry its ticket, if one is out, and its waiters in the order of their arrival.

    When an entry is given up, the first waiter that would fill it takes over. Every waiter came after
    the one that fills, so requests only ever wait for older ones and never in a circle.
    """

    def __init__(self, table: EntryTable, counters: CacheCounters) -> None:
        self._table = table
        self._counters = counters
        self._waiters: dict[Entry, list[Waiter]] = {}
        self._claims: dict[ref[FillTicket], Entry] = {}

    def claim(self, entry: Entry) -> FillTicket:
        """A ticket for an entry that nobody fills. One that is lost counts as abandoned."""
        loop = asyncio.get_running_loop()

        def lost(claim: ref[FillTicket]) -> None:  # in whatever thread the garbage is collected
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._give_up, claim)

        ticket = FillTicket(entry.wanted, entry.runs)
        self._claims[ref(ticket, lost)] = entry
        return ticket

    def take(self, ticket: FillTicket) -> Entry:
        """Its entry, which the caller fills from now on. ValueError when the ticket is no longer good."""
        entry = self._claims.pop(ref(ticket), None)
        if entry is None:
            raise ValueError(f"the ticket for {ticket.key} was filled, abandoned or closed before")
        return entry

    def abandon(self, ticket: FillTicket) -> None:
        """Lets somebody else fill it. Does nothing to a ticket that is no longer good."""
        self._give_up(ref(ticket))

    def join(self, entry: Entry, *, claim: bool, joined: bool) -> Waiter:
        """Waits for a FILLING entry."""
        waiter = Waiter(claim, joined, asyncio.get_running_loop().create_future())
        self._waiters.setdefault(entry, []).append(waiter)
        return waiter

    def leave(self, entry: Entry, waiter: Waiter) -> None:
        """Ends a wait, giving back what it may have got already."""
        future = waiter.future
        if not future.done():
            future.cancel()
        if future.cancelled():
            waiters = self._waiters.get(entry, [])
            if waiter in waiters:
                waiters.remove(waiter)
        elif future.exception() is None:
            match future.result():
                case Handle() as handle:
                    self._table.unpin(handle)
                case FillTicket() as ticket:
                    self.abandon(ticket)

    def ready(self, entry: Entry) -> None:
        """The entry's rows are whole. Pins them for each waiter."""
        self._table.make_ready(entry)
        for waiter in self._waiters.pop(entry, []):
            if not waiter.future.done():
                waiter.future.set_result(self._table.pin(entry))
                self._counters.hits_joined += waiter.joined

    def fail(self, entry: Entry, *, draining: bool = False) -> None:
        """The entry was given up. Unless its pages are still being written, another takes it over."""
        waiters = [waiter for waiter in self._waiters.pop(entry, []) if not waiter.future.done()]
        heir = None if draining else next((waiter for waiter in waiters if waiter.claim), None)
        if heir is None:
            self._table.drop(entry, draining=draining)
        else:
            heir.future.set_result(self.claim(entry))
            self._waiters[entry] = [waiter for waiter in waiters if waiter.claim and waiter is not heir]
        for waiter in waiters:
            if not waiter.claim:
                waiter.future.set_result(Unfilled.MISSING)
            elif draining:
                waiter.future.set_result(Unfilled.GONE)

    def close(self, error: Exception) -> None:
        """Ends every wait with `error` and takes back every ticket."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.future.done():
                    waiter.future.set_exception(error)
        self._waiters.clear()
        claims, self._claims = self._claims, {}
        for entry in claims.values():
            self._table.drop(entry)

    def _give_up(self, claim: ref[FillTicket]) -> None:
        entry = self._claims.pop(claim, None)
        if entry is not None:
            self._counters.abandoned += 1
            self.fail(entry)
