"""Packed attention by flash-attn's `flash_attn_varlen_func`, when that package is installed.

Signature and mask conventions: flash_attn/flash_attn_interface.py of github.com/Dao-AILab/flash-attention
(2.7 and 2.8). Tested against that signature only; never executed on a device here.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch.nn.functional import pad

from epd.kernels.attention.layout import Plan


class FlashAttention:
    """Backend over a module with `flash_attn_varlen_func`; fp16 and bf16 on CUDA."""

    name = "flash_attn"
    builds_window = True

    def __init__(self, module: Any) -> None:
        self._varlen = module.flash_attn_varlen_func

    @classmethod
    def find(cls) -> FlashAttention | None:
        """The installed flash-attn, or None when there is none."""
        if importlib.util.find_spec("flash_attn") is None:
            return None
        return cls(importlib.import_module("flash_attn"))

    def attend(
        self,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGE: torch.Tensor,
        plan: Plan,
        *,
        causal: bool,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `Backend.attend`. Its causal mask is aligned to the last query and the last key."""
        q, k, v, value_size = level_head_sizes(q_THD, k_SGD, v_SGE)
        out: torch.Tensor = self._varlen(
            q,
            k,
            v,
            cu_seqlens_q=plan.queries.cu_seqlens,
            cu_seqlens_k=plan.keys.cu_seqlens,
            max_seqlen_q=plan.queries.max_length,
            max_seqlen_k=plan.keys.max_length,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size=window_sides(causal, window),
        )
        return out[..., :value_size].contiguous()


def window_sides(causal: bool, window: int | None) -> tuple[int, int]:
    """(left, right) keys seen beside the query's own, -1 for all: flash-attn's convention."""
    reach = -1 if window is None else window - 1
    return (reach, 0 if causal else reach)


def level_head_sizes(
    q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGE: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Zero-pad the smaller head size, for kernels that take one size for all; exact, since the
    added columns add zero to every score or are cut off the result. Returns E as well.
    """
    key_size, value_size = q_THD.shape[2], v_SGE.shape[2]
    size = max(key_size, value_size)
    if key_size < size:
        q_THD, k_SGD = (pad(x, (0, size - key_size)) for x in (q_THD, k_SGD))
    if value_size < size:
        v_SGE = pad(v_SGE, (0, size - value_size))
    return q_THD, k_SGD, v_SGE, value_size
