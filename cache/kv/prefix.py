"""Pages of past prompts, found again by a hash over all that decided their content."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from epd.cache.types import MediaGrid


@dataclass(frozen=True, slots=True)
class KeyedSpan:
    """Tokens `start .. start + length - 1` of a sequence that hold the rows of the media `key`."""

    start: int
    length: int
    grid: MediaGrid
    key: str


def page_hashes(
    token_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    spans: Sequence[KeyedSpan],
    salt: str | None,
    page_size: int,
) -> list[bytes]:
    """A hash for each full page of a sequence, chained: it stands for the page and all before it.

    Covers the salt, token ids `[T]`, positions `[3, T]`, and of media that reach into the page the
    key, the grid and which of its rows lie there. All pictures share one placeholder id, so that token ids
    alone would make two pictures of one size the same prompt.
    """
    chain = blake2b(repr(salt).encode(), digest_size=32).digest()
    hashes = []
    for start in range(0, len(token_ids) // page_size * page_size, page_size):
        end = start + page_size
        media = [
            (span.key, span.grid.t, span.grid.h, span.grid.w, span.start - start, span.length)
            for span in spans
            if span.start < end and span.start + span.length > start
        ]
        page = blake2b(chain, digest_size=32)
        page.update(token_ids[start:end].tobytes())
        page.update(positions[:, start:end].tobytes())
        page.update(repr(media).encode())
        chain = page.digest()
        hashes.append(chain)
    return hashes


class PrefixCache:
    """Pages by hash, each used by any number of sequences at once; unused ones go when room is needed.

    Owns the pages that it was given until it evicts them. Not thread-safe: one owner.
    """

    def __init__(self) -> None:
        # Least recently used first. A page is always younger than those that continue it, so that
        # eviction takes the ends of chains before their beginnings.
        self._pages: OrderedDict[bytes, int] = OrderedDict()
        self._users: Counter[bytes] = Counter()

    @property
    def num_idle(self) -> int:
        """Pages that nobody uses."""
        return len(self._pages) - len(self._users)

    def __len__(self) -> int:
        return len(self._pages)

    def acquire(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest known beginning of `hashes`; they stay until `release`."""
        known = []
        for page_hash in hashes:
            if page_hash not in self._pages:
                break
            known.append(page_hash)
        self._users.update(known)
        self.touch(known)
        return [self._pages[page_hash] for page_hash in known]

    def release(self, hashes: Sequence[bytes]) -> None:
        """End one use of each page."""
        for page_hash in hashes:
            assert self._users[page_hash] > 0, "released more often than acquired"
            self._users[page_hash] -= 1
            if not self._users[page_hash]:
                del self._users[page_hash]

    def add(self, hashes: Sequence[bytes], pages: Sequence[int]) -> list[int]:
        """Take over pages that hold the content of `hashes`; returns those that it has already."""
        spare = []
        for page_hash, page in zip(hashes, pages, strict=True):
            if self._pages.setdefault(page_hash, page) != page:
                spare.append(page)
        return spare

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a chain as just used, its beginning last."""
        for page_hash in reversed(hashes):
            if page_hash in self._pages:
                self._pages.move_to_end(page_hash)

    def evict(self, num_pages: int) -> list[int]:
        """Give up as many pages as asked, or as many as nobody uses; returns them."""
        idle = (h for h in self._pages if h not in self._users)
        chosen = [h for h, _ in zip(idle, range(num_pages), strict=False)]
        return [self._pages.pop(h) for h in chosen]

    def check_integrity(self, used: int) -> None:
        """Raises AssertionError unless the uses are `used` in all, of pages it has, each page once."""
        assert self._users.total() == used, f"{self._users.total()} uses, {used} are accounted for"
        assert self._users.keys() <= self._pages.keys(), "a page in use was evicted"
        assert len(set(self._pages.values())) == len(self._pages), "one page under two hashes"
