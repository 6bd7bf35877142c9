"""The interfaces around attention: the pass that layers call, and the store and backend behind it.

Shape suffixes: T packed tokens, S packed key/value tokens, H query heads, G key/value heads (grouped
queries: H is a multiple of G), D head size of queries and keys, E head size of values.
"""

from __future__ import annotations

from typing import Protocol

import torch

from epd.kernels.attention.layout import Plan, SequenceLayout


class AttentionPass(Protocol):
    """Attention of one forward. Layers call `attend` in order, each with its own index."""

    @property
    def layout(self) -> SequenceLayout:
        """Where the query tokens of each sequence lie in the packed batch."""

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
        """Attend within each sequence and return `o_THE`, contiguous.

        window: keys that a query sees on each side of itself, itself included (a causal query at
        position i sees i - window + 1 .. i); None sees all. cross: where keys and values lie when they
        are another sequence's (cross-attention, never causal); None for self-attention.
        """


class Backend(Protocol):
    """One way to compute packed attention."""

    @property
    def name(self) -> str:
        """For logs and `/info`."""

    @property
    def builds_window(self) -> bool:
        """Whether `window` may be given."""

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
        """Return `o_THE`. Queries are the last tokens of their keys: a cached prefix comes first."""


class KVStore(Protocol):
    """What the paged path needs of a KV pool."""

    @property
    def stores_verbatim(self) -> bool:
        """Whether what is gathered has the very bits that were written."""

    def set_kv(self, layer: int, slots: torch.Tensor, k_TGD: torch.Tensor, v_TGE: torch.Tensor) -> None:
        """Write token i to slot `slots[i]` (int64 `[T]`, distinct) of one layer."""

    def get_kv(
        self, layer: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather `k_SGD` and `v_SGE` of one layer in the order of `slots`, as `dtype`."""
