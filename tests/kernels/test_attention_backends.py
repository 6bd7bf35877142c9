"""The CUDA backends against the signatures that their libraries publish; none of this runs on a device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from epd.kernels.attention.backends import GROUPED, backend_for
from epd.kernels.attention.flash import FlashAttention
from epd.kernels.attention.layout import Plan, SequenceLayout
from epd.kernels.attention.torch_varlen import TorchVarlen
from tests.kernels.reference_attention import random_qkv, reference

QUERIES, KEYS = SequenceLayout([3, 1, 6]), SequenceLayout([7, 5, 6])


def attend_as_documented(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlens: tuple[int, int],
    scale: float | None,
    sides: tuple[int, int],
) -> torch.Tensor:
    """What both libraries say they compute: windows (left, right) around the query, aligned to the end."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert q.shape[2] == k.shape[2] == v.shape[2], "these kernels take one head size"
    queries, keys = (SequenceLayout(x.diff().tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
    assert max_seqlens == (queries.max_length, keys.max_length)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    left, right = sides
    causal = right == 0
    assert causal or left == right
    window = None if left == -1 else left + 1
    return reference(q, k, v, queries, keys, causal=causal, scale=scale, window=window)


class FakeFlashAttn:
    """A module with the function as github.com/Dao-AILab/flash-attention 2.8 publishes it
    (flash_attn/flash_attn_interface.py): same parameters in the same order with the same defaults.
    """

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert dropout_p == 0.0
        sides = (window_size[0], 0) if causal else window_size
        return attend_as_documented(
            q, k, v, cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k), softmax_scale, sides
        )


def varlen_attn_210(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> torch.Tensor:
    """docs.pytorch.org/docs/2.10/nn.attention.varlen.html; takes equal numbers of heads."""
    assert query.shape[1] == key.shape[1]
    sides = (-1, 0 if is_causal else -1)
    return attend_as_documented(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), None, sides)


def varlen_attn_211(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """docs.pytorch.org/docs/2.11/nn.attention.varlen.html; takes equal numbers of heads."""
    assert query.shape[1] == key.shape[1]
    return attend_as_documented(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), scale, window_size)


def varlen_attn_213(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """docs.pytorch.org/docs/2.12/nn.attention.varlen.html, 2.13 the same."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_k is not None
    assert num_splits == 1
    return attend_as_documented(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), scale, window_size)


BACKENDS: dict[str, FlashAttention | TorchVarlen] = {
    "flash_attn": FlashAttention(FakeFlashAttn),
    "torch_2.10": TorchVarlen(varlen_attn_210),
    "torch_2.11": TorchVarlen(varlen_attn_211),
    "torch_2.13": TorchVarlen(varlen_attn_213),
}


@pytest.mark.parametrize("sizes", [(16, 16), (16, 8), (8, 16)], ids=["equal", "narrow_v", "wide_v"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_call_means_what_was_asked(
    name: str, heads: tuple[int, int], causal: bool, sizes: tuple[int, int]
) -> None:
    """Each signature is called so that scale, causality, grouped heads and head sizes come out right."""
    q, k, v = random_qkv(QUERIES.num_tokens, KEYS.num_tokens, heads, sizes)
    out = BACKENDS[name].attend(q, k, v, Plan(QUERIES, KEYS), causal=causal, scale=0.3)
    want = reference(q, k, v, QUERIES, KEYS, causal=causal, scale=0.3)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("name", ["flash_attn", "torch_2.11", "torch_2.13"])
def test_windows_are_built_where_the_library_can(name: str, causal: bool) -> None:
    """A window of w tokens reaches w - 1 beyond the query."""
    q, k, v = random_qkv(QUERIES.num_tokens, KEYS.num_tokens, (4, 4))
    assert BACKENDS[name].builds_window
    out = BACKENDS[name].attend(q, k, v, Plan(QUERIES, KEYS), causal=causal, scale=0.3, window=3)
    want = reference(q, k, v, QUERIES, KEYS, causal=causal, scale=0.3, window=3)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=1e-5)


def test_torch_210_says_that_it_builds_no_window() -> None:
    """Its function has no window_size, so the guard must turn such layers away."""
    assert not BACKENDS["torch_2.10"].builds_window


def test_a_function_without_causality_is_refused() -> None:
    """An unknown signature is an error at start, not a wrong mask later."""

    def varlen_attn(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query

    with pytest.raises(ValueError, match="causal"):
        TorchVarlen(varlen_attn)


def test_the_installed_torch_takes_the_call() -> None:
    """torch's real function, run on meta tensors, accepts our arguments and returns our shape."""
    backend = TorchVarlen.find()
    assert backend is not None, "torch is at least 2.10"
    q, k, v = (x.to("meta", torch.bfloat16) for x in random_qkv(10, 18, (4, 2)))
    queries, keys = (SequenceLayout(x.lengths, "meta") for x in (QUERIES, KEYS))
    out = backend.attend(q, k, v, Plan(queries, keys), causal=True, scale=0.3)
    assert out.shape == (10, 4, 16)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attn_is_optional() -> None:
    """Without the package there is no such backend, and nothing fails."""
    assert FlashAttention.find() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpus_group_equal_lengths(dtype: torch.dtype) -> None:
    """On a CPU every dtype runs grouped."""
    q, _, v = random_qkv(2, 2, dtype=dtype)
    assert backend_for(q, v) is GROUPED


def _cuda_qkv(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x.cuda() for x in random_qkv(10, 18, (16, 8), (128, 128), dtype))
    return q, k, v


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("find", [TorchVarlen.find, FlashAttention.find])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_on_a_device_the_kernels_agree_with_the_formula(
    find: Callable[[], FlashAttention | TorchVarlen | None], causal: bool
) -> None:
    """bfloat16 on CUDA, keys longer than queries."""
    backend = find()
    if backend is None:
        pytest.skip("not installed")
    q, k, v = _cuda_qkv(torch.bfloat16)
    queries, keys = (SequenceLayout(x.lengths, "cuda") for x in (QUERIES, KEYS))
    out = backend.attend(q, k, v, Plan(queries, keys), causal=causal, scale=0.09)
    want = reference(q.cpu(), k.cpu(), v.cpu(), QUERIES, KEYS, causal=causal, scale=0.09)
    torch.testing.assert_close(out.cpu(), want, atol=2e-2, rtol=2e-2)
