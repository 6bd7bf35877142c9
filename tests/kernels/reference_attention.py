"""Attention by its formula, one sequence at a time, in float64: what every path is compared with."""

from __future__ import annotations

import torch

from epd.kernels.attention.layout import SequenceLayout


def reference(
    q_THD: torch.Tensor,
    k_SGD: torch.Tensor,
    v_SGE: torch.Tensor,
    queries: SequenceLayout,
    keys: SequenceLayout,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """`o_THE` in the dtype of the queries, which are the last tokens of their keys."""
    repeat = q_THD.shape[1] // k_SGD.shape[1]
    parts = []
    for i, (n, m) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        q = q_THD[queries.offsets[i] : queries.offsets[i + 1]].double()
        k = k_SGD[keys.offsets[i] : keys.offsets[i + 1]].double().repeat_interleave(repeat, 1)
        v = v_SGE[keys.offsets[i] : keys.offsets[i + 1]].double().repeat_interleave(repeat, 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
        gap = torch.arange(m - n, m)[:, None] - torch.arange(m)
        hidden = gap < 0 if causal else torch.zeros_like(gap, dtype=torch.bool)
        if window is not None:
            hidden = hidden | (gap.abs() >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
        parts.append(torch.einsum("hnm,mhe->nhe", scores.softmax(-1), v))
    return torch.cat(parts).to(q_THD.dtype)


def random_qkv(
    queries: int,
    keys: int,
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values; `heads` (H, G), `sizes` (D, E)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((queries, heads[0], sizes[0]), (keys, heads[1], sizes[0]), (keys, heads[1], sizes[1]))
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v
