"""The paged path: each layer's keys and values go into a store by slot and come back gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epd.kernels.attention.backends import GROUPED, backend_for
from epd.kernels.attention.base import Backend, KVStore
from epd.kernels.attention.layout import Plan, SequenceLayout


@dataclass(frozen=True, slots=True)
class Slots:
    """Where one batch's keys and values live in the store, as int64 on the device.

    context: how many keys each sequence has in all, its cached prefix first. write `[T]`: slots of the
    batch's own tokens. read `[S]`: slots of every key, sequence by sequence. cross `[C]`: slots of
    the other sequence's keys in cross-attention, or None.
    """

    context: SequenceLayout
    write: torch.Tensor
    read: torch.Tensor
    cross: torch.Tensor | None = None


class PagedKV:
    """AttentionPass through a store. One vectorised write and one gather per layer.

    save_kv_cache=False reads what the store holds and writes nothing.
    """

    def __init__(
        self,
        store: KVStore,
        layout: SequenceLayout,
        slots: Slots,
        *,
        save_kv_cache: bool = True,
        backend: Backend | None = None,
    ) -> None:
        """Raises ValueError when a sequence has fewer keys than queries."""
        self.layout = layout
        self._store = store
        self._slots = slots
        self._save = save_kv_cache
        self._backend = backend
        self._plan = Plan(layout, slots.context)
        self._longer = layout.lengths != slots.context.lengths
        if any(m < n for n, m in zip(layout.lengths, slots.context.lengths, strict=True)):
            raise ValueError(f"{layout.lengths} queries but only {slots.context.lengths} keys")

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
        """See `AttentionPass.attend`. A bidirectional layer must see whole sequences."""
        assert causal or cross is not None or not self._longer, "a prefix has no bidirectional meaning"
        write, read, plan = self._slots.write, self._slots.read, self._plan
        if cross is not None:
            assert self._slots.cross is not None, "cross-attention needs slots of its own"
            write = read = self._slots.cross
            plan = Plan(self.layout, cross)
        if self._save:
            self._store.set_kv(layer, write, k_TGD, v_TGE)
        k_SGD, v_SGE = self._store.get_kv(layer, read, q_THD.dtype)
        backend = self._backend or backend_for(q_THD, v_SGE)
        if window is not None and not backend.builds_window:
            backend = GROUPED
        return backend.attend(q_THD, k_SGD, v_SGE, plan, causal=causal, scale=scale, window=window)
