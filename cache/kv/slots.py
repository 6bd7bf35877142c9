"""Who holds which pages of a KV pool."""

from __future__ import annotations

from collections.abc import Sequence


class SlotAllocator:
    """Hands out single pages `0 .. num_pages - 1`. Not thread-safe: one owner."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int] | None:
        """That many pages, or None when fewer are free. Raises ValueError for a negative number."""
        if num_pages < 0:
            raise ValueError(f"cannot allocate {num_pages} pages")
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        self._held.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back. Raises ValueError for one that is not held."""
        for page in pages:
            if page not in self._held:
                raise ValueError(f"page {page} is not held")
            self._held.remove(page)
            self._free.append(page)

    def check_integrity(self, held: int) -> None:
        """Raises AssertionError unless `held` pages are out and free and held ones make up all."""
        assert len(self._held) == held, f"{len(self._held)} pages are out, {held} are accounted for"
        assert len(self._free) + held == self.num_pages, f"{len(self._free)} + {held} != {self.num_pages}"
        assert not self._held.intersection(self._free), "a page is both free and held"
