"""Skip-KV: prefill attends to the keys and values it just made; nothing is written or gathered."""

from __future__ import annotations

import torch

from epd.kernels.attention.backends import backend_for
from epd.kernels.attention.base import Backend
from epd.kernels.attention.layout import Plan, SequenceLayout


class SkipKV:
    """AttentionPass over each sequence's own keys and values. Vision towers use it too.

    Without a backend, the best one for the tensors at hand is taken.
    """

    def __init__(self, layout: SequenceLayout, backend: Backend | None = None) -> None:
        self.layout = layout
        self._backend = backend
        self._plan = Plan(layout, layout)

    def attend(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_TGE: torch.Tensor,
        *,
        causal: bool,
        scale: float,
        window: int | None = None,
        cross: SequenceLayout | None = None,
    ) -> torch.Tensor:
        """See `AttentionPass.attend`."""
        plan = self._plan if cross is None else Plan(self.layout, cross)
        backend = self._backend or backend_for(q_THD, v_TGE)
        return backend.attend(q_THD, k_TGD, v_TGE, plan, causal=causal, scale=scale, window=window)
