"""What a store is: rows by key, beyond the process and perhaps beyond the host."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import torch

from epd.cache.entry import Buffer

Buffers = Sequence[Buffer]
"""The memory of one object, in order: its header, then one `(pointer, size)` per page run."""


class GetResult(Enum):
    """How the read of one key went. The buffers hold the object for HOST and STORE only."""

    HOST = auto()
    """Read from memory of this host."""
    STORE = auto()
    """Read from the far store."""
    ABSENT = auto()
    """Not stored."""
    WRONG_SIZE = auto()
    """Stored, but not of exactly the buffers' size."""
    FAILED = auto()
    """The store could not be read."""
    SKIPPED = auto()
    """Not asked: the store fails too often (see `epd.cache.breaker`)."""

    @property
    def is_hit(self) -> bool:
        return self in (GetResult.HOST, GetResult.STORE)


class PutResult(Enum):
    """How the write of one key went."""

    STORED = auto()
    """Stored now or before: others can read it."""
    FULL = auto()
    """No room."""
    BUSY = auto()
    """Another has begun to put it, and has not ended: perhaps it died."""
    FAILED = auto()
    """The store could not be written."""
    SKIPPED = auto()
    """Not asked: the store fails too often."""


class Store(Protocol):
    """Every method blocks, may be called from several threads, and reports trouble by its result.

    An object is whole or absent: a reader never sees one that is half written. A put of a key that is
    stored keeps the old bytes. Results are per key, in the order given.
    """

    def register(self, memory: torch.Tensor) -> None:
        """Tells, once, before any call, which memory (uint8 `[bytes]`) the buffers will lie in."""
        ...

    def near(self) -> Store | None:
        """What of it is memory of this host, where a read takes a copy's time and cannot hang."""
        ...

    def exists(self, keys: Sequence[str]) -> list[bool]: ...

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[GetResult]: ...

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[PutResult]: ...

    def remove(self, keys: Sequence[str]) -> None:
        """Takes objects away, as far as that can be done: those that were found to be damaged."""
        ...

    def stats(self) -> dict[str, int]:
        """Counters of its own, under names of its own."""
        ...

    def close(self) -> None:
        """Ends it. No call is running, and none follows."""
        ...


def total_size(buffers: Buffers) -> int:
    """Bytes of one object."""
    return sum(size for _, size in buffers)
