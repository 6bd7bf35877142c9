"""What a caller of the cache holds: pins on rows that are there, and promises to make rows that are not."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd.cache.types import MediaGrid, MediaKey, PageRun, Wanted
from epd.kernels.async_copy import AsyncCopy


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A pin: until it is released, once, its rows stay where they are. Handles compare by identity."""

    wanted: Wanted
    runs: tuple[PageRun, ...]
    copies: list[AsyncCopy] = field(default_factory=list, repr=False)
    """Loads that may still read the rows; the cache waits for them before it lets the rows go."""

    @property
    def key(self) -> MediaKey:
        return self.wanted.key

    @property
    def grid(self) -> MediaGrid:
        return self.wanted.grid

    @property
    def num_tokens(self) -> int:
        return self.wanted.num_tokens


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class FillTicket:
    """The duty to make the rows of `wanted`: fill it or abandon it. A lost one counts as abandoned."""

    wanted: Wanted
    runs: tuple[PageRun, ...]

    @property
    def key(self) -> MediaKey:
        return self.wanted.key


@dataclass(frozen=True, slots=True)
class Acquired:
    """Answer to `acquire`: each key that was wanted is in exactly one of the three."""

    handles: dict[MediaKey, Handle] = field(default_factory=dict)
    tickets: dict[MediaKey, FillTicket] = field(default_factory=dict)
    missing: list[MediaKey] = field(default_factory=list)
