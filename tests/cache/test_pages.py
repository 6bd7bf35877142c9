"""The page allocator: one run where one will do, and never a page twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.cache.pages import PageAllocator
from epd.cache.types import PageRun


def test_the_smallest_range_that_holds_the_request_is_taken() -> None:
    """Best fit: a hole of the right size is preferred to the large rest."""
    pages = PageAllocator(10)
    runs = [pages.allocate(n) for n in (2, 1, 3, 4)]
    assert runs[0] is not None
    assert runs[2] is not None
    pages.free(runs[0])
    pages.free(runs[2])
    assert pages.allocate(2) == (PageRun(0, 2),)
    assert pages.allocate(3) == (PageRun(3, 3),)


def test_without_one_large_range_several_are_taken() -> None:
    """Fragmented pages are handed out as few runs, in the pool's order."""
    pages = PageAllocator(6)
    runs = [pages.allocate(1) for _ in range(6)]
    for index in (0, 2, 3, 5):
        pages.free(runs[index] or ())
    assert pages.allocate(5) is None
    assert pages.allocate(4) == (PageRun(0, 1), PageRun(2, 2), PageRun(5, 1))
    assert pages.num_free == 0


def test_freed_neighbours_become_one_range() -> None:
    """Pages freed in any order can be had as one run again."""
    pages = PageAllocator(5)
    runs = [pages.allocate(1) for _ in range(5)]
    for index in (1, 3, 2, 0, 4):
        pages.free(runs[index] or ())
        pages.check_integrity()
    assert pages.allocate(5) == (PageRun(0, 5),)


@pytest.mark.parametrize("run", [PageRun(0, 1), PageRun(3, 1), PageRun(1, 3), PageRun(2, 9), PageRun(2, 0)])
def test_pages_that_are_not_handed_out_cannot_be_freed(run: PageRun) -> None:
    """Freeing free pages, or pages that are not there, is refused and changes nothing."""
    pages = PageAllocator(4)
    pages.allocate(4)
    pages.free((PageRun(0, 1),))
    pages.free((PageRun(3, 1),))
    with pytest.raises(ValueError, match="not handed out"):
        pages.free((run,))
    assert pages.num_free == 2
    pages.check_integrity()


@pytest.mark.parametrize("count", [0, -1])
def test_counts_below_one_are_refused(count: int) -> None:
    """Neither an empty pool nor an empty request makes sense."""
    with pytest.raises(ValueError):
        PageAllocator(count)
    with pytest.raises(ValueError):
        PageAllocator(1).allocate(count)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=80))
def test_no_page_is_ever_had_twice(steps: list[tuple[bool, int]]) -> None:
    """Against a model: pages stay disjoint and counted, and one run is had where it can be."""
    pages = PageAllocator(24)
    held: list[tuple[PageRun, ...]] = []
    for is_free, number in steps:
        if is_free and held:
            pages.free(held.pop(number % len(held)))
        else:
            largest = max(range_lengths(held), default=0)
            runs = pages.allocate(number)
            assert (runs is None) == (number > 24 - sum(r.length for h in held for r in h))
            if runs is not None:
                assert sum(r.length for r in runs) == number
                assert len(runs) == 1 or number > largest
                held.append(runs)
        taken = [p for h in held for r in h for p in range(r.start, r.start + r.length)]
        assert len(set(taken)) == len(taken)
        assert pages.num_free == 24 - len(taken)
        pages.check_integrity()


def range_lengths(held: list[tuple[PageRun, ...]]) -> list[int]:
    """Lengths of the free ranges that `held` leave in 24 pages."""
    taken = {p for h in held for r in h for p in range(r.start, r.start + r.length)}
    text = "".join("x" if page in taken else "." for page in range(24))
    return [len(part) for part in text.split("x")]
