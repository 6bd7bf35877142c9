"""Which pages of a pool are free, as ranges of neighbours."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from epd.cache.types import PageRun


class PageAllocator:
    """Hands out page runs: one run when a free range is large enough, else as few as possible.

    Best fit: the smallest free range that holds the request. O(log n) steps in the number of free
    ranges. Not thread-safe: one owner.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        self.num_pages = num_pages
        self._num_free = num_pages
        self._starts: list[int] = [0]
        self._length_of: dict[int, int] = {0: num_pages}
        self._by_length: list[tuple[int, int]] = [(num_pages, 0)]

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> tuple[PageRun, ...] | None:
        """Runs of `count` pages in all, or None when fewer are free."""
        if count < 1:
            raise ValueError(f"at least one page must be asked for, got {count}")
        if count > self._num_free:
            return None
        runs = []
        while count:
            fit = bisect_left(self._by_length, (count, 0))
            length, start = self._by_length[min(fit, len(self._by_length) - 1)]
            taken = min(length, count)
            self._remove(start)
            if length > taken:
                self._insert(start + taken, length - taken)
            runs.append(PageRun(start, taken))
            count -= taken
            self._num_free -= taken
        return tuple(sorted(runs, key=lambda run: run.start))

    def free(self, runs: tuple[PageRun, ...]) -> None:
        """Takes runs back. Raises ValueError, changing nothing more, when one is not handed out."""
        for start, length in ((run.start, run.length) for run in runs):
            after = bisect_right(self._starts, start)
            following = self._starts[after] if after < len(self._starts) else self.num_pages
            before = self._starts[after - 1] if after else None
            before_end = 0 if before is None else before + self._length_of[before]
            if length < 1 or before_end > start or start + length > following:
                raise ValueError(f"pages {start} to {start + length - 1} are not handed out")
            self._num_free += length
            if following == start + length and following < self.num_pages:
                length += self._remove(following)
            if before is not None and before_end == start:
                length += self._remove(before)
                start = before
            self._insert(start, length)

    def check_integrity(self) -> None:
        """Raises RuntimeError, with numbers, when free ranges touch, overlap or are miscounted."""
        end, total = -1, 0
        for start in self._starts:
            length = self._length_of[start]
            if start <= end or start + length > self.num_pages:
                raise RuntimeError(f"free range {start}+{length} touches {end} or leaves {self.num_pages}")
            end, total = start + length, total + length
        by_length = sorted((length, start) for start, length in self._length_of.items())
        if total != self._num_free or by_length != self._by_length:
            raise RuntimeError(f"{total} pages in free ranges, {self._num_free} counted")

    def _insert(self, start: int, length: int) -> None:
        insort(self._starts, start)
        insort(self._by_length, (length, start))
        self._length_of[start] = length

    def _remove(self, start: int) -> int:
        length = self._length_of.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._by_length[bisect_left(self._by_length, (length, start))]
        return length
