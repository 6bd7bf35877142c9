"""Every guard's way out: the paged path runs, its result is right, and the reason is counted."""

from __future__ import annotations

import pytest
import torch

from epd.cache.kv.base import KVShape
from epd.cache.kv.noop import KVPoolAccessError, NoOpKVPool
from epd.cache.kv.paged import PagedKVPool
from epd.kernels.attention.base import AttentionPass
from epd.kernels.attention.grouped import GroupedSDPA
from epd.kernels.attention.guarded import GuardedAttention
from epd.kernels.attention.guards import BatchFacts, Decisions, Reason
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.paged import PagedKV, Slots
from tests.kernels.reference_attention import random_qkv, reference

LAYOUT = SequenceLayout([4, 9, 4])
SHAPE = KVShape(1, 2, 16, 16)
SCALE = 0.25


class FakeWindowlessBackend(GroupedSDPA):
    """A skip path that builds no window, as on torch 2.10 with CUDA."""

    builds_window = False


def paged_pool(dtype: torch.dtype | None = None) -> PagedKVPool:
    return PagedKVPool(SHAPE, page_size=4, max_total_tokens=64, model_dtype=torch.float32, dtype=dtype)


def guarded(
    pool: PagedKVPool | NoOpKVPool,
    facts: BatchFacts,
    *,
    layout: SequenceLayout = LAYOUT,
    slots: Slots | None = None,
    backend: GroupedSDPA | None = None,
) -> tuple[GuardedAttention, Decisions]:
    decisions = Decisions()
    own = torch.arange(layout.num_tokens)

    def paged() -> AttentionPass:
        return PagedKV(
            pool, layout, slots or Slots(layout, own, own), save_kv_cache=facts.save_kv_cache, backend=backend
        )

    attention = GuardedAttention(
        layout, facts, decisions, paged, stores_verbatim=pool.stores_verbatim, backend=backend
    )
    return attention, decisions


def test_nothing_in_the_way_skips_and_writes_nothing() -> None:
    """The plain batch leaves the pool untouched."""
    pool = paged_pool()
    attention, decisions = guarded(pool, BatchFacts())
    q, k, v = random_qkv(17, 17)
    out = attention.attend(0, q, k, v, causal=True, scale=SCALE)
    torch.testing.assert_close(out, reference(q, k, v, LAYOUT, LAYOUT, causal=True, scale=SCALE))
    assert decisions.as_dict()["skipped"] == 1
    assert not pool.k_view(0).any()


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (BatchFacts(skip=False), Reason.SWITCHED_OFF),
        (BatchFacts(generation=True), Reason.GENERATION),
        (BatchFacts(kept_for_reuse=True), Reason.KEPT_FOR_REUSE),
    ],
)
def test_batches_that_must_be_stored_are(facts: BatchFacts, reason: Reason) -> None:
    """The result is bitwise the skip path's, and keys and values lie in the pool."""
    pool = paged_pool()
    q, k, v = random_qkv(17, 17)
    attention, decisions = guarded(pool, facts)
    plain, _ = guarded(paged_pool(), BatchFacts())
    out = attention.attend(0, q, k, v, causal=True, scale=SCALE)
    assert torch.equal(out, plain.attend(0, q, k, v, causal=True, scale=SCALE))
    assert {name: n for name, n in decisions.as_dict().items() if n} == {reason.value: 1}
    assert torch.equal(pool.k_view(0)[:17], k)
    assert torch.equal(pool.v_view(0)[:17], v)


def test_unsaved_batches_read_what_the_pool_has() -> None:
    """save_kv_cache=False: the pool's keys and values count, not those handed in, and stay as they are."""
    pool = paged_pool()
    q, k, v = random_qkv(17, 17)
    pool.set_kv(0, torch.arange(17), k, v)
    attention, decisions = guarded(pool, BatchFacts(save_kv_cache=False))
    nothing = torch.full_like(k, torch.nan)
    out = attention.attend(0, q, nothing, nothing, causal=True, scale=SCALE)
    torch.testing.assert_close(out, reference(q, k, v, LAYOUT, LAYOUT, causal=True, scale=SCALE))
    assert decisions.as_dict()["kv_not_saved"] == 1
    assert torch.equal(pool.k_view(0)[:17], k)


def test_cross_attention_keeps_the_other_sequences_keys() -> None:
    """The keys of the other sequences go to slots of their own."""
    other = SequenceLayout([2, 7, 5])
    pool, place = paged_pool(), torch.arange(17)
    slots = Slots(LAYOUT, place, place, cross=torch.arange(20, 34))
    attention, decisions = guarded(pool, BatchFacts(), slots=slots)
    q, k, v = random_qkv(17, 14)
    out = attention.attend(0, q, k, v, causal=False, scale=SCALE, cross=other)
    torch.testing.assert_close(out, reference(q, k, v, LAYOUT, other, causal=False, scale=SCALE))
    assert decisions.as_dict()["cross_attention"] == 1
    assert torch.equal(pool.k_view(0)[20:34], k)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (BatchFacts(cached_prefix=True), Reason.CACHED_PREFIX),
        (BatchFacts(partial_chunk=True), Reason.PARTIAL_CHUNK),
    ],
)
def test_continued_sequences_see_what_came_before(facts: BatchFacts, reason: Reason) -> None:
    """The last 5 of 12 tokens, the first 7 stored by an earlier batch."""
    pool, context, new = paged_pool(), SequenceLayout([12]), SequenceLayout([5])
    q, k, v = random_qkv(12, 12)
    place = torch.arange(12)
    pool.set_kv(0, place[:7], k[:7], v[:7])
    attention, decisions = guarded(pool, facts, layout=new, slots=Slots(context, place[7:], place))
    out = attention.attend(0, q[7:], k[7:], v[7:], causal=True, scale=SCALE)
    want = reference(q, k, v, context, context, causal=True, scale=SCALE)[7:]
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)
    assert decisions.as_dict()[reason] == 1


def test_a_pool_that_rounds_is_what_is_attended_to() -> None:
    """With fp8 storage the result is that of the rounded keys and values."""
    attention, decisions = guarded(paged_pool(torch.float8_e4m3fn), BatchFacts())
    q, k, v = random_qkv(17, 17)
    out = attention.attend(0, q, k, v, causal=True, scale=SCALE)
    k8, v8 = (x.to(torch.float8_e4m3fn).float() for x in (k, v))
    torch.testing.assert_close(out, reference(q, k8, v8, LAYOUT, LAYOUT, causal=True, scale=SCALE))
    assert decisions.as_dict()["pool_not_verbatim"] == 1


def test_a_window_that_the_skip_path_does_not_build() -> None:
    """The paged path builds it; a window wider than every sequence is none."""
    attention, decisions = guarded(paged_pool(), BatchFacts(), backend=FakeWindowlessBackend())
    q, k, v = random_qkv(17, 17)
    out = attention.attend(0, q, k, v, causal=True, scale=SCALE, window=3)
    want = reference(q, k, v, LAYOUT, LAYOUT, causal=True, scale=SCALE, window=3)
    torch.testing.assert_close(out, want)
    attention.attend(0, q, k, v, causal=True, scale=SCALE, window=9)
    assert decisions.as_dict()["sliding_window"] == 1
    assert decisions.as_dict()["skipped"] == 1


def test_a_pool_without_memory_refuses_the_fallback() -> None:
    """With the no-op pool a guard's way out ends in a sentence, not in a wrong result."""
    pool = NoOpKVPool(SHAPE, page_size=4, max_total_tokens=64, model_dtype=torch.float32)
    attention, _ = guarded(pool, BatchFacts(generation=True))
    q, k, v = random_qkv(17, 17)
    with pytest.raises(KVPoolAccessError, match="kv_cache: none"):
        attention.attend(0, q, k, v, causal=True, scale=SCALE)
