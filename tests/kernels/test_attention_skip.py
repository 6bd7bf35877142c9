"""Skip-KV and the layouts under it, against attention by its formula."""

from __future__ import annotations

import pytest
import torch

from epd.kernels.attention.layout import Plan, SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from tests.kernels.reference_attention import random_qkv, reference

LENGTHS = [5, 1, 17, 5, 64, 1, 30]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
SHAPES = [((16, 8), (32, 32)), ((8, 8), (32, 32)), ((16, 8), (32, 24)), ((4, 2), (16, 40))]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("heads", "sizes"), SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_sequence_attends_to_itself_alone(
    dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int], causal: bool
) -> None:
    """Packed sequences get what each would get alone, with grouped heads and a value size of its own."""
    layout = SequenceLayout(LENGTHS)
    q, k, v = random_qkv(layout.num_tokens, layout.num_tokens, heads, sizes, dtype)
    out = SkipKV(layout).attend(0, q, k, v, causal=causal, scale=0.2)
    want = reference(q, k, v, layout, layout, causal=causal, scale=0.2)
    assert out.shape == (layout.num_tokens, heads[0], sizes[1])
    assert out.dtype == dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", [[7, 7, 7], [7, 8, 7], [9]])
def test_head_major_tensors_are_taken(lengths: list[int]) -> None:
    """Queries, keys and values may be transposed views, as model layers hand them over."""
    layout = SequenceLayout(lengths)
    q, k, v = random_qkv(layout.num_tokens, layout.num_tokens)
    views = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    attention = SkipKV(layout)
    a, b = (attention.attend(0, *x, causal=True, scale=0.25) for x in ((q, k, v), views))
    assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("window", [1, 4, 1000])
def test_a_sliding_window_hides_what_lies_outside(window: int, causal: bool) -> None:
    """A query sees `window` keys on each side, itself included."""
    layout = SequenceLayout(LENGTHS)
    q, k, v = random_qkv(layout.num_tokens, layout.num_tokens)
    out = SkipKV(layout).attend(0, q, k, v, causal=causal, scale=0.25, window=window)
    want = reference(q, k, v, layout, layout, causal=causal, scale=0.25, window=window)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=0)


def test_cross_attention_reads_the_other_sequences_keys() -> None:
    """With `cross`, each query sees all keys of its own sequence's other side."""
    layout, other = SequenceLayout([3, 5]), SequenceLayout([7, 2])
    q, k, v = random_qkv(8, 9)
    out = SkipKV(layout).attend(0, q, k, v, causal=False, scale=0.25, cross=other)
    torch.testing.assert_close(
        out, reference(q, k, v, layout, other, causal=False, scale=0.25), atol=2e-6, rtol=0
    )


def test_groups_join_equal_lengths() -> None:
    """One dense call serves all sequences of a length; neighbours need no gather."""
    layout = SequenceLayout([4, 4, 9, 4])
    groups = Plan(layout, layout).groups
    assert [(g.queries.count, g.queries.length) for g in groups] == [(3, 4), (1, 9)]
    assert groups[0].queries.index is not None
    assert groups[1].queries.index is None
    same = SequenceLayout([4, 4])
    assert Plan(same, same).groups[0].queries.index is None


def test_cu_seqlens_are_the_offsets() -> None:
    """The cumulative lengths are int32, as varlen kernels want them."""
    cu_seqlens = SequenceLayout([2, 3]).cu_seqlens
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 2, 5]


@pytest.mark.parametrize("lengths", [[0], [3, -1]])
def test_empty_sequences_are_refused(lengths: list[int]) -> None:
    """A length below one is the caller's mistake."""
    with pytest.raises(ValueError, match="positive"):
        SequenceLayout(lengths)


def test_layouts_that_do_not_match_are_refused() -> None:
    """Queries and keys must be of the same sequences."""
    with pytest.raises(ValueError, match="1 query sequences but 2"):
        Plan(SequenceLayout([1]), SequenceLayout([1, 2]))
