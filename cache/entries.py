"""The entries of a pool: who has which pages, who is pinned, who may go. One owner, no waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise

from epd.cache.handles import Handle
from epd.cache.pages import PageAllocator
from epd.cache.pool import PagePool
from epd.cache.stats import CacheCounters
from epd.cache.types import PageRun, Wanted


class EntryState(Enum):
    FILLING = auto()
    """Somebody writes its rows, or is about to."""
    READY = auto()
    """Its rows are whole."""
    DRAINING = auto()
    """Given up, while a native call or a copy may still write its pages. Not found by anybody."""
    GONE = auto()
    """Its pages are others'."""


@dataclass(slots=True, eq=False)
class Entry:
    """Rows in the pool. `pins`: live handles."""

    wanted: Wanted
    runs: tuple[PageRun, ...]
    state: EntryState = EntryState.FILLING
    pins: int = 0

    @property
    def num_pages(self) -> int:
        return sum(run.length for run in self.runs)


@dataclass(slots=True)
class EntryTable:
    """Entries by what is wanted (key, grid and length: two grids never share rows), over one pool.

    FILLING -> READY -> GONE; FILLING -> GONE; FILLING -> DRAINING -> GONE. Only READY entries without
    a pin are evicted, the least recently used first. `on_room` is called when pages became
    free or evictable.
    """

    pool: PagePool
    on_room: Callable[[], None]
    counters: CacheCounters
    _allocator: PageAllocator = field(init=False)
    _entries: dict[Wanted, Entry] = field(default_factory=dict)
    _idle: dict[Wanted, Entry] = field(default_factory=dict)
    """READY without a pin, the least recently used first."""
    _idle_pages: int = 0
    _draining: set[Entry] = field(default_factory=set)
    _pinned: dict[Handle, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._allocator = PageAllocator(self.pool.num_pages)

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_draining(self) -> int:
        """Pages of entries that are draining."""
        return sum(entry.num_pages for entry in self._draining)

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    @property
    def num_filling(self) -> int:
        return sum(entry.state is EntryState.FILLING for entry in self._entries.values())

    @property
    def num_pins(self) -> int:
        return len(self._pinned)

    def find(self, wanted: Wanted) -> Entry | None:
        """The entry, FILLING or READY."""
        return self._entries.get(wanted)

    def has_room(self, num_pages: int, sparing: list[Entry]) -> bool:
        """Whether so many pages are free or can be made so without evicting `sparing`."""
        spared = sum(entry.num_pages for entry in sparing if entry.wanted in self._idle)
        return num_pages <= self._allocator.num_free + self._idle_pages - spared

    def create(self, wanted: Wanted) -> Entry:
        """A FILLING entry with pages, evicting others as needed. There must be room."""
        assert wanted not in self._entries, f"{wanted.key} is there already"
        num_pages = self.pool.pages_for(wanted.num_tokens)
        while self._allocator.num_free < num_pages:
            self._evict_one()
        runs = self._allocator.allocate(num_pages)
        assert runs is not None
        entry = self._entries[wanted] = Entry(wanted, runs)
        return entry

    def make_ready(self, entry: Entry) -> None:
        assert entry.state is EntryState.FILLING, f"{entry.wanted.key} is {entry.state.name}"
        entry.state = EntryState.READY
        self._set_idle(entry)

    def pin(self, entry: Entry) -> Handle:
        assert entry.state is EntryState.READY, f"{entry.wanted.key} is {entry.state.name}"
        if not entry.pins:
            del self._idle[entry.wanted]
            self._idle_pages -= entry.num_pages
        entry.pins += 1
        handle = Handle(entry.wanted, entry.runs)
        self._pinned[handle] = entry
        return handle

    def entry_of(self, handle: Handle) -> Entry | None:
        """The entry that a live handle pins."""
        return self._pinned.get(handle)

    def unpin(self, handle: Handle) -> None:
        """Raises ValueError when the handle was released before."""
        entry = self._pinned.pop(handle, None)
        if entry is None:
            raise ValueError(f"the handle of {handle.key} was released before")
        entry.pins -= 1
        if not entry.pins:
            self._set_idle(entry)

    def drop(self, entry: Entry, *, draining: bool = False) -> None:
        """Ends a FILLING entry. `draining`: its pages may still be written; see `drained`."""
        assert entry.state is EntryState.FILLING, f"{entry.wanted.key} is {entry.state.name}"
        del self._entries[entry.wanted]
        if draining:
            entry.state = EntryState.DRAINING
            self._draining.add(entry)
        else:
            self._free(entry)

    def drained(self, entry: Entry) -> None:
        """Nothing writes the entry's pages any more."""
        self._draining.remove(entry)
        self._free(entry)

    def check_integrity(self) -> None:
        """Raises RuntimeError, with numbers, unless every page has one owner and every pin one handle."""
        self._allocator.check_integrity()
        owners = [*self._entries.values(), *self._draining]
        taken = sum(entry.num_pages for entry in owners)
        if self.num_free + taken != self.pool.num_pages:
            raise RuntimeError(
                f"{self.num_free} pages free, {taken} of entries ({self.num_draining} draining), "
                f"{self.pool.num_pages} in the pool"
            )
        runs = sorted((run.start, run.length) for entry in owners for run in entry.runs)
        for (start, length), (following, _) in pairwise(runs):
            if start + length > following:
                raise RuntimeError(
                    f"two entries have page {following}: runs {start}+{length} and {following}"
                )
        pins = sum(entry.pins for entry in owners)
        if pins != len(self._pinned):
            raise RuntimeError(f"{pins} pins on entries, {len(self._pinned)} live handles")
        idle = {e.wanted: e for e in owners if e.state is EntryState.READY and not e.pins}
        idle_pages = sum(entry.num_pages for entry in idle.values())
        if idle != self._idle or idle_pages != self._idle_pages:
            raise RuntimeError(
                f"{len(idle)} idle entries of {idle_pages} pages, "
                f"{len(self._idle)} of {self._idle_pages} listed"
            )

    def _set_idle(self, entry: Entry) -> None:
        self._idle[entry.wanted] = entry
        self._idle_pages += entry.num_pages
        self.on_room()

    def _evict_one(self) -> None:
        wanted, entry = next(iter(self._idle.items()))
        del self._idle[wanted], self._entries[wanted]
        self._idle_pages -= entry.num_pages
        self._allocator.free(entry.runs)
        entry.state = EntryState.GONE
        self.counters.evictions += 1
        self.counters.evicted_bytes += entry.num_pages * self.pool.page_bytes

    def _free(self, entry: Entry) -> None:
        entry.state = EntryState.GONE
        self._allocator.free(entry.runs)
        self.on_room()
