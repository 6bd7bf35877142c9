"""KV pools: sizes, views, pointers, and the pool that allocates nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from epd.cache.kv.base import KVPool, KVShape
from epd.cache.kv.factory import make_pool
from epd.cache.kv.noop import KVPoolAccessError, NoOpKVPool
from epd.cache.kv.paged import PagedKVPool
from epd.cache.kv.settings import KVSettings

QWEN3_06B = KVShape(num_layers=28, num_kv_heads=8, head_dim_k=128, head_dim_v=128)
SMALL = KVShape(num_layers=3, num_kv_heads=2, head_dim_k=16, head_dim_v=8)
POOLS = (PagedKVPool, NoOpKVPool)


def small(kind: type[PagedKVPool] | type[NoOpKVPool], tokens: int = 64) -> PagedKVPool | NoOpKVPool:
    return kind(SMALL, page_size=4, max_total_tokens=tokens, model_dtype=torch.float32)


def test_bytes_of_the_06b_shape() -> None:
    """16,384 tokens of 28 layers with 8 heads of 128 in bfloat16 are 1,879,048,192 bytes, half of them K."""
    pool = PagedKVPool(QWEN3_06B, page_size=16, max_total_tokens=16384, model_dtype=torch.bfloat16)
    assert sum(pool.size_bytes()) == 1_879_048_192
    assert pool.size_bytes() == (939_524_096, 939_524_096)


def test_no_bytes_at_the_same_capacity() -> None:
    """The no-op pool shows the batcher as many tokens, and holds one page per layer."""
    pool = NoOpKVPool(QWEN3_06B, page_size=16, max_total_tokens=16384, model_dtype=torch.bfloat16)
    assert pool.num_tokens == 16384
    assert pool.size_bytes() == (0, 0)
    assert pool.placeholder_bytes == 28 * 2 * 16 * 8 * 128 * 2


def test_keys_and_values_have_their_own_head_sizes() -> None:
    """V may be narrower than K, and costs less then."""
    pool = small(PagedKVPool)
    assert pool.size_bytes() == (3 * 64 * 2 * 16 * 4, 3 * 64 * 2 * 8 * 4)


def test_fp8_storage_is_a_quarter_of_float32() -> None:
    """The storage dtype is the pool's own."""
    pool = PagedKVPool(
        SMALL, page_size=4, max_total_tokens=64, model_dtype=torch.float32, dtype=torch.float8_e4m3fn
    )
    assert pool.size_bytes() == tuple(n // 4 for n in small(PagedKVPool).size_bytes())
    assert not pool.stores_verbatim


@pytest.mark.parametrize("kind", POOLS)
def test_capacity_is_whole_pages(kind: type[PagedKVPool] | type[NoOpKVPool]) -> None:
    """max_total_tokens is a cap: what does not fill a page is left out, with memory or without."""
    pool = small(kind, tokens=67)
    assert (pool.num_pages, pool.num_tokens) == (16, 64)


@pytest.mark.parametrize("kind", POOLS)
def test_a_cap_below_one_page_is_refused(kind: type[PagedKVPool] | type[NoOpKVPool]) -> None:
    """The message names both settings."""
    with pytest.raises(ValueError, match=r"max_total_tokens=3 .* page_size=4"):
        small(kind, tokens=3)


@pytest.mark.parametrize("kind", POOLS)
def test_views_and_pointers_are_legal(kind: type[PagedKVPool] | type[NoOpKVPool]) -> None:
    """Each layer has contiguous views of slots and of pages, and pointers and strides that lead to them."""
    pool: KVPool = small(kind)
    for layer in range(3):
        k, v = pool.k_view(layer), pool.v_view(layer)
        assert k.shape[1:] == (2, 16)
        assert v.shape[1:] == (2, 8)
        assert k.is_contiguous()
        assert v.is_contiguous()
        k_pages, v_pages = pool.paged_views(layer)
        assert k_pages.shape == (k.shape[0] // 4, 4, 2, 16)
        assert v_pages.shape == (v.shape[0] // 4, 4, 2, 8)
        assert pool.k_data_ptrs[layer].item() == k.data_ptr() == k_pages.data_ptr()
        assert pool.v_data_ptrs[layer].item() == v.data_ptr() == v_pages.data_ptr()
    assert pool.data_ptrs.tolist() == [*pool.k_data_ptrs.tolist(), *pool.v_data_ptrs.tolist()]
    assert pool.data_ptrs.dtype == pool.k_data_ptrs.dtype == pool.v_data_ptrs.dtype == torch.uint64
    assert len(set(pool.data_ptrs.tolist())) == 6
    assert pool.data_strides.tolist() == [2 * 16 * 4] * 3 + [2 * 8 * 4] * 3


def test_a_placeholder_is_one_page() -> None:
    """[page_size, kv_heads, head_dim], V with a head size of its own."""
    pool = small(NoOpKVPool)
    assert pool.k_view(2).shape == (4, 2, 16)
    assert pool.v_view(2).shape == (4, 2, 8)


def test_what_is_written_comes_back_in_the_order_asked_for() -> None:
    """Slots may be scattered, layers do not mix, and the bits are the same."""
    pool = small(PagedKVPool)
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 8)
    pool.set_kv(1, torch.tensor([40, 7, 22]), k, v)
    got_k, got_v = pool.get_kv(1, torch.tensor([22, 40, 7]), torch.float32)
    assert torch.equal(got_k, k[[2, 0, 1]])
    assert torch.equal(got_v, v[[2, 0, 1]])
    assert not pool.k_view(0).any()
    assert not pool.v_view(2).any()


def test_fp8_rounds_and_clamps() -> None:
    """Values beyond fp8's range become its largest, never NaN."""
    pool = PagedKVPool(
        SMALL, page_size=4, max_total_tokens=8, model_dtype=torch.bfloat16, dtype=torch.float8_e4m3fn
    )
    k = torch.tensor([1.03, 1e6, -1e6, 0.0]).to(torch.bfloat16).repeat(8).view(1, 2, 16)
    pool.set_kv(0, torch.tensor([5]), k, k[..., :8])
    got, _ = pool.get_kv(0, torch.tensor([5]), torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert got[0, 0, :4].tolist() == [1.0, 448.0, -448.0, 0.0]


def test_another_storage_dtype_is_refused() -> None:
    """Neither the model's dtype nor fp8 e4m3: the message names it."""
    with pytest.raises(ValueError, match="float16"):
        PagedKVPool(SMALL, page_size=4, max_total_tokens=8, model_dtype=torch.float32, dtype=torch.float16)


def test_the_no_op_pool_refuses_access_with_a_sentence() -> None:
    """Which modes it is for, and what to use instead; nothing is written."""
    pool = small(NoOpKVPool)
    slots, k, v = torch.tensor([0]), torch.ones(1, 2, 16), torch.ones(1, 2, 8)
    with pytest.raises(KVPoolAccessError, match=r"layer 1 tried to write.*embedding models.*kv_cache: paged"):
        pool.set_kv(1, slots, k, v)
    with pytest.raises(KVPoolAccessError, match="read from"):
        pool.get_kv(1, slots, torch.float32)
    assert not pool.k_view(1).any()


@pytest.mark.parametrize(
    ("kv_cache", "said"),
    [
        ("none", "64 logical tokens, a placeholder page of 4 per layer, 2304 bytes"),
        ("paged", "64 tokens in 16 pages of 4, torch.float32, K 24576 bytes, V 12288 bytes"),
    ],
)
def test_one_line_is_logged(kv_cache: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """Allocation leaves exactly one line, with capacity and bytes."""
    settings = KVSettings.model_validate({"kv_cache": kv_cache, "page_size": 4, "max_total_tokens": 64})
    with caplog.at_level(logging.INFO, logger="epd"):
        pool = make_pool(settings, SMALL, torch.float32, "cpu")
    assert [said in message for message in caplog.messages] == [True]
    assert isinstance(pool, NoOpKVPool if kv_cache == "none" else PagedKVPool)
