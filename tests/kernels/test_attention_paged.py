"""The paged path: bitwise the skip path where both apply, and right where only it does."""

from __future__ import annotations

import pytest
import torch

from epd.cache.kv.base import KVShape
from epd.cache.kv.paged import PagedKVPool
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.paged import PagedKV, Slots
from epd.kernels.attention.skip_kv import SkipKV
from tests.kernels.reference_attention import random_qkv, reference

SHAPES = {
    "gqa": ((16, 8), (32, 32)),
    "mha": ((8, 8), (32, 32)),
    "narrow_values": ((16, 8), (32, 16)),
    "wide_values": ((8, 8), (16, 32)),
}


def make_pool(
    heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, tokens: int = 2048
) -> PagedKVPool:
    shape = KVShape(2, heads[1], *sizes)
    return PagedKVPool(shape, page_size=16, max_total_tokens=tokens, model_dtype=dtype)


def scattered_slots(pool: PagedKVPool, num_tokens: int) -> torch.Tensor:
    """Slots in no order, as pages that come and go leave them."""
    return torch.randperm(pool.num_tokens, generator=torch.Generator().manual_seed(1))[:num_tokens]


def both_ways(
    lengths: list[int], heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = SequenceLayout(lengths)
    pool = make_pool(heads, sizes, dtype)
    slots = scattered_slots(pool, layout.num_tokens)
    q, k, v = random_qkv(layout.num_tokens, layout.num_tokens, heads, sizes, dtype)
    paged = PagedKV(pool, layout, Slots(layout, write=slots, read=slots))
    scale = sizes[0] ** -0.5
    return (
        SkipKV(layout).attend(1, q, k, v, causal=causal, scale=scale),
        paged.attend(1, q, k, v, causal=causal, scale=scale),
    )


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_length_alone_is_bitwise_the_skip_path(shape: str, dtype: torch.dtype, causal: bool) -> None:
    """Sequences of 1 to 64 tokens, one a batch."""
    for length in range(1, 65):
        skip, paged = both_ways([length], *SHAPES[shape], dtype, causal)
        assert torch.equal(skip, paged), length


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_lengths_are_bitwise_the_skip_path(shape: str, dtype: torch.dtype, causal: bool) -> None:
    """Lengths between 1 and 512 in one batch, some of them equal."""
    skip, paged = both_ways([1, 512, 30, 64, 30, 7, 255, 1, 333], *SHAPES[shape], dtype, causal)
    assert torch.equal(skip, paged)


@pytest.mark.parametrize("window", [None, 6])
def test_queries_after_a_prefix_see_it(window: int | None) -> None:
    """Keys stored by earlier batches come first; the mask is aligned to the last token."""
    context, new = SequenceLayout([9, 20, 9, 5]), SequenceLayout([3, 1, 3, 5])
    pool = make_pool((4, 2), (16, 16), torch.float32)
    q, _, _ = random_qkv(new.num_tokens, 1)
    _, k, v = random_qkv(1, context.num_tokens)
    slots = scattered_slots(pool, context.num_tokens)
    own = torch.cat(
        [torch.arange(end - n, end) for n, end in zip(new.lengths, context.offsets[1:], strict=True)]
    )
    earlier = torch.ones(context.num_tokens, dtype=torch.bool).index_fill(0, own, False)
    pool.set_kv(0, slots[earlier], k[earlier], v[earlier])
    paged = PagedKV(pool, new, Slots(context, write=slots[own], read=slots))
    out = paged.attend(0, q, k[own], v[own], causal=True, scale=0.25, window=window)
    want = reference(q, k, v, new, context, causal=True, scale=0.25, window=window)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=0)


def test_fewer_keys_than_queries_are_refused() -> None:
    """A context counts the batch's own tokens too."""
    pool = make_pool((4, 2), (16, 16), torch.float32)
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="keys"):
        PagedKV(pool, SequenceLayout([3]), Slots(SequenceLayout([2]), write=none, read=none))


def test_fp8_storage_is_close_and_not_equal() -> None:
    """Stored in fp8 e4m3 (3 bits of mantissa), keys and values come back within 2**-4 of themselves."""
    layout = SequenceLayout([12, 30])
    pool = PagedKVPool(
        KVShape(1, 2, 16, 16),
        page_size=16,
        max_total_tokens=64,
        model_dtype=torch.float32,
        dtype=torch.float8_e4m3fn,
    )
    slots = scattered_slots(pool, 42)
    q, k, v = random_qkv(42, 42)
    out = PagedKV(pool, layout, Slots(layout, write=slots, read=slots)).attend(
        0, q, k, v, causal=True, scale=0.25
    )
    want = reference(q, k, v, layout, layout, causal=True, scale=0.25)
    assert not torch.equal(out, want)
    torch.testing.assert_close(out, want, atol=0.15, rtol=2**-4)
