"""The pass that prefill uses: skip where every guard holds, the paged path where one does not."""

from __future__ import annotations

from collections.abc import Callable

import torch

from epd.kernels.attention.backends import backend_for
from epd.kernels.attention.base import AttentionPass, Backend
from epd.kernels.attention.guards import BatchFacts, Decisions, LayerFacts, PathFacts, skip_refusal
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV


class GuardedAttention:
    """AttentionPass that decides per layer and counts each decision by its reason.

    paged: makes the paged pass, once, at the first layer that needs it.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        batch: BatchFacts,
        decisions: Decisions,
        paged: Callable[[], AttentionPass],
        *,
        stores_verbatim: bool,
        backend: Backend | None = None,
    ) -> None:
        self.layout = layout
        self._batch = batch
        self._decisions = decisions
        self._make_paged = paged
        self._paged: AttentionPass | None = None
        self._stores_verbatim = stores_verbatim
        self._backend = backend
        self._skip = SkipKV(layout, backend)
        self._whole = not (batch.cached_prefix or batch.partial_chunk)

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
        backend = self._backend or backend_for(q_THD, v_TGE)
        if window is not None and self._whole and window >= self.layout.max_length:
            window = None  # it covers every sequence
        reason = skip_refusal(
            self._batch,
            LayerFacts(cross_attention=cross is not None, window=window),
            PathFacts(self._stores_verbatim, backend.builds_window),
        )
        self._decisions.count(reason)
        chosen = self._skip if reason is None else self._paged_pass()
        return chosen.attend(
            layer, q_THD, k_TGD, v_TGE, causal=causal, scale=scale, window=window, cross=cross
        )

    def _paged_pass(self) -> AttentionPass:
        if self._paged is None:
            self._paged = self._make_paged()
        return self._paged
