"""Pages of a KV pool: slots, leases, and prefixes found again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epd.cache.kv.leases import KVPages
from epd.cache.kv.prefix import KeyedSpan, PrefixCache, page_hashes
from epd.cache.kv.slots import SlotAllocator
from epd.cache.types import MediaGrid

TOKENS = np.arange(20, dtype=np.int64)
POSITIONS = np.arange(60, dtype=np.int64).reshape(3, 20)
SPAN = KeyedSpan(start=6, length=4, grid=MediaGrid(1, 4, 4), key="space/cat")


def hashes(
    tokens: Any = TOKENS, positions: Any = POSITIONS, spans: Any = (SPAN,), salt: str | None = None
) -> list[bytes]:
    return page_hashes(tokens, positions, spans, salt, page_size=4)


def changed(array: np.ndarray[Any, np.dtype[np.int64]], index: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    other = array.copy()
    other[index] += 1
    return other


def test_only_full_pages_have_a_hash() -> None:
    """A page that a later prompt could fill otherwise is never shared."""
    assert len(hashes()) == 5
    assert page_hashes(TOKENS[:3], POSITIONS[:, :3], (), None, 4) == []


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"tokens": changed(TOKENS, 9)}, 2),
        ({"positions": changed(POSITIONS, (2, 13))}, 3),
        ({"spans": (replace(SPAN, key="space/dog"),)}, 1),
        ({"spans": (replace(SPAN, grid=MediaGrid(1, 2, 8)),)}, 1),
        ({"spans": (replace(SPAN, start=7),)}, 1),
        ({"spans": ()}, 1),
        ({"salt": "tenant"}, 0),
        ({"salt": ""}, 0),
    ],
)
def test_the_chain_breaks_at_the_first_difference(other: dict[str, Any], same: int) -> None:
    """Tokens, positions, media key, grid, place and salt all count, from their page on."""
    a, b = hashes(), hashes(**other)
    assert [x == y for x, y in zip(a, b, strict=True)] == [True] * same + [False] * (5 - same)


def test_pictures_that_start_later_do_not_count() -> None:
    """A prompt may share its beginning with one that goes on differently."""
    longer = np.arange(24, dtype=np.int64)
    positions = np.concatenate([POSITIONS, POSITIONS[:, :4]], axis=1)
    late = KeyedSpan(20, 4, MediaGrid(1, 4, 4), "space/late")
    assert hashes(longer, positions, (SPAN, late))[:5] == hashes()


def test_slots_are_handed_out_once() -> None:
    """None when there are too few; misuse is a ValueError."""
    slots = SlotAllocator(3)
    pages = slots.allocate(2)
    assert pages is not None
    assert slots.allocate(2) is None
    slots.check_integrity(held=2)
    slots.free(pages)
    with pytest.raises(ValueError, match="not held"):
        slots.free(pages[:1])
    with pytest.raises(ValueError, match="-1"):
        slots.allocate(-1)
    assert slots.num_free == 3


def test_a_lease_gives_each_token_a_slot() -> None:
    """Slots are distinct and lie in pages of its own."""
    pages = KVPages(num_pages=8, page_size=4)
    a, b = pages.lease(10), pages.lease(7)
    assert a is not None
    assert b is not None
    assert len({*a.slots.tolist(), *b.slots.tolist()}) == 17
    pages.check_integrity()
    pages.end(a)
    pages.end(b)
    pages.check_integrity()
    assert pages.stats() == {"kv_pages": 8, "kv_pages_free": 8, "kv_pages_cached": 0, "kv_leases": 0}


def test_a_full_pool_says_none_and_an_impossible_sequence_is_refused() -> None:
    """Waiting helps in the first case only."""
    pages = KVPages(num_pages=4, page_size=4)
    assert pages.lease(12) is not None
    assert pages.lease(8) is None
    with pytest.raises(ValueError, match="17 tokens need 5 pages, the pool has 4"):
        pages.lease(17)


def run_once(pages: KVPages, length: int, chain: list[bytes]) -> int:
    """A whole life of one sequence; returns the tokens that it found."""
    lease = pages.lease(length, chain)
    assert lease is not None
    pages.end(lease, chain)
    pages.check_integrity()
    return lease.cached_tokens


def test_a_prompt_finds_the_pages_of_one_that_started_alike() -> None:
    """20 tokens, then the same 12 and others."""
    pages = KVPages(num_pages=16, page_size=4)
    assert run_once(pages, 20, hashes()) == 0
    other = hashes(changed(TOKENS, 13))
    lease = pages.lease(20, other)
    assert lease is not None
    assert lease.cached_tokens == 12
    assert len(set(lease.slots.tolist())) == 20
    pages.end(lease, other)
    pages.check_integrity()


def test_a_full_hit_still_runs_the_last_token() -> None:
    """Its slot is apart, since cached pages are never written."""
    pages = KVPages(num_pages=16, page_size=4)
    first = pages.lease(20)
    assert first is not None
    pages.end(first, hashes())
    again = pages.lease(20, hashes())
    assert again is not None
    assert again.cached_tokens == 19
    assert again.slots[:19].tolist() == first.slots[:19].tolist()
    assert again.slots[19] not in first.slots
    pages.end(again, hashes())
    pages.check_integrity()


def test_a_full_hit_in_a_full_pool_runs_its_last_page() -> None:
    """Where no page is left beside its own, the last one is given up and run again."""
    pages = KVPages(num_pages=5, page_size=4)
    assert run_once(pages, 20, hashes()) == 0
    assert run_once(pages, 20, hashes()) == 16
    assert run_once(pages, 20, hashes()) == 16


def test_old_prompts_make_room() -> None:
    """What nobody uses is evicted, ends of chains first."""
    pages = KVPages(num_pages=6, page_size=4)
    run_once(pages, 20, hashes())
    other = hashes(salt="other")
    run_once(pages, 12, other[:3])
    assert run_once(pages, 20, hashes()) == 12


def test_pages_in_use_are_not_evicted() -> None:
    """A shared prefix stays while one sequence still reads it."""
    pages = KVPages(num_pages=6, page_size=4)
    run_once(pages, 16, hashes()[:4])
    holder = pages.lease(18, hashes()[:4])
    assert holder is not None
    assert pages.lease(8) is None
    assert pages.lease(4) is not None
    pages.check_integrity()


def test_the_same_prompt_twice_at_once_keeps_one_copy() -> None:
    """The second to finish gives its pages back."""
    pages = KVPages(num_pages=16, page_size=4)
    a, b = pages.lease(20, hashes()), pages.lease(20, hashes())
    assert a is not None
    assert b is not None
    pages.end(a, hashes())
    pages.end(b, hashes())
    pages.check_integrity()
    assert pages.stats()["kv_pages_cached"] == 5


def test_a_failed_sequence_leaves_nothing() -> None:
    """Ending a lease without hashes keeps none of its pages."""
    pages = KVPages(num_pages=8, page_size=4)
    lease = pages.lease(20, hashes())
    assert lease is not None
    pages.end(lease)
    assert run_once(pages, 20, hashes()) == 0


def test_a_cache_counts_its_uses() -> None:
    """check_integrity notices a use that nobody accounts for."""
    cache = PrefixCache()
    cache.add(hashes()[:1], [3])
    cache.acquire(hashes()[:1])
    with pytest.raises(AssertionError, match="1 uses"):
        cache.check_integrity(used=0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.booleans()), max_size=40))
def test_any_order_of_leases_keeps_every_page_accounted_for(steps: list[tuple[int, int, bool]]) -> None:
    """Random prompts of four kinds come and go, keeping their pages or not."""
    pages, held = KVPages(num_pages=12, page_size=4), []
    for kind, length, keep in steps:
        tokens = np.arange(length, dtype=np.int64)
        chain = page_hashes(tokens, np.stack([tokens] * 3), (), str(kind), 4)
        lease = pages.lease(length, chain)
        if lease is not None:
            assert lease.cached_tokens < length == len(set(lease.slots.tolist()))
            held.append((lease, chain if keep else []))
        if held and (lease is None or not keep):
            pages.end(*held.pop(0))
        pages.check_integrity()
    for lease, chain in held:
        pages.end(lease, chain)
    pages.check_integrity()
