"""Packed attention by torch's own `torch.nn.attention.varlen.varlen_attn` (CUDA).

Its signature changed between releases, so what it takes is probed, not assumed:
torch 2.10  (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None)
torch 2.11  `is_causal` gone; keywords return_aux, scale, window_size, where (-1, 0) means causal
torch 2.12  adds enable_gqa, seqused_k, block_table, num_splits (2.13 the same)
Source: docs.pytorch.org/docs/{2.10,2.11,2.12,2.13}/nn.attention.varlen.html and the installed 2.13.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from epd.kernels.attention.flash import level_head_sizes, window_sides
from epd.kernels.attention.layout import Plan


class TorchVarlen:
    """Backend over one `varlen_attn`; fp16 and bf16 on CUDA.

    Raises ValueError when the function can express causal attention in neither known way.
    """

    name = "torch_varlen"

    def __init__(self, varlen_attn: Callable[..., Any]) -> None:
        self._varlen = varlen_attn
        self._takes = frozenset(inspect.signature(varlen_attn).parameters)
        if not self._takes & {"is_causal", "window_size"}:
            raise ValueError(f"varlen_attn{inspect.signature(varlen_attn)} has no way to say causal")

    @classmethod
    def find(cls) -> TorchVarlen | None:
        """The installed torch's, or None when it has none."""
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            return None
        return cls(importlib.import_module("torch.nn.attention.varlen").varlen_attn)

    @property
    def builds_window(self) -> bool:
        """torch 2.10 has no sliding window."""
        return "window_size" in self._takes

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
        """See `Backend.attend`. `num_splits=1` keeps a sequence's bits the same in every batch."""
        assert window is None or self.builds_window, "the guard lets no window through"
        queries_per_key = q_THD.shape[1] // k_SGD.shape[1]
        q, k, v, value_size = level_head_sizes(q_THD, k_SGD, v_SGE)
        options: dict[str, Any] = {}
        if "window_size" in self._takes:
            options["window_size"] = window_sides(causal, window)
        else:
            options["is_causal"] = causal
        if "scale" in self._takes:
            options["scale"] = scale
        elif scale != q.shape[2] ** -0.5:
            q = q * (scale * q.shape[2] ** 0.5)
        if "enable_gqa" in self._takes:
            options["enable_gqa"] = queries_per_key > 1
        elif queries_per_key > 1:
            k, v = (x.repeat_interleave(queries_per_key, dim=1) for x in (k, v))
        if "num_splits" in self._takes:
            options["num_splits"] = 1
        out: torch.Tensor = self._varlen(
            q,
            k,
            v,
            plan.queries.cu_seqlens,
            plan.keys.cu_seqlens,
            plan.queries.max_length,
            plan.keys.max_length,
            **options,
        )
        return out[..., :value_size].contiguous()
