"""The one interface of KV pools: what the batcher, the attention paths and monitoring see of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import NamedTuple

import torch


class KVShape(NamedTuple):
    """What one token leaves in each layer: keys `[num_kv_heads, head_dim_k]`, values `[.., head_dim_v]`."""

    num_layers: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int


class KVPool(ABC):
    """Token slots in pages; slot s of a layer is row s of `k_view(layer)` and of `v_view(layer)`.

    page_size: tokens of a page. num_pages: pages that may be handed out (see `SlotAllocator`).
    dtype: of what is stored. Subclasses fill `_k` and `_v`, one tensor per layer.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        page_size: int,
        max_total_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Capacity is `max_total_tokens` rounded down to whole pages. Raises ValueError below one page."""
        if page_size < 1 or max_total_tokens < page_size:
            raise ValueError(
                f"max_total_tokens={max_total_tokens} does not hold one page of page_size={page_size} tokens"
            )
        self.shape = shape
        self.page_size = page_size
        self.num_pages = max_total_tokens // page_size
        self.dtype = dtype
        self.device = device
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []

    @property
    def num_tokens(self) -> int:
        """Capacity in tokens, whether or not memory stands behind it."""
        return self.num_pages * self.page_size

    def k_view(self, layer: int) -> torch.Tensor:
        """`[slots, num_kv_heads, head_dim_k]`, contiguous."""
        return self._k[layer]

    def v_view(self, layer: int) -> torch.Tensor:
        """`[slots, num_kv_heads, head_dim_v]`, contiguous."""
        return self._v[layer]

    def paged_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as `[pages, page_size, num_kv_heads, head_dim]`, for kernels that take block tables."""
        k, v = self._k[layer], self._v[layer]
        return (
            k.view(-1, self.page_size, *k.shape[1:]),
            v.view(-1, self.page_size, *v.shape[1:]),
        )

    @cached_property
    def k_data_ptrs(self) -> torch.Tensor:
        """uint64 `[layers]` on the device: where each layer's keys start."""
        return self._pointers(self._k)

    @cached_property
    def v_data_ptrs(self) -> torch.Tensor:
        """uint64 `[layers]` on the device: where each layer's values start."""
        return self._pointers(self._v)

    @cached_property
    def data_ptrs(self) -> torch.Tensor:
        """uint64 `[2 * layers]`: `k_data_ptrs`, then `v_data_ptrs`."""
        return self._pointers([*self._k, *self._v])

    @cached_property
    def data_strides(self) -> torch.Tensor:
        """int64 `[2 * layers]` on the device: bytes from one token slot to the next, as `data_ptrs`."""
        strides = [x.stride(0) * x.element_size() for x in (*self._k, *self._v)]
        return torch.tensor(strides, dtype=torch.int64, device=self.device)

    @property
    @abstractmethod
    def stores_verbatim(self) -> bool:
        """Whether a gather returns the very bits that were written (no cast on the way)."""

    @abstractmethod
    def set_kv(self, layer: int, slots: torch.Tensor, k_TGD: torch.Tensor, v_TGE: torch.Tensor) -> None:
        """Write token i to slot `slots[i]` (int64 `[T]` on the device, distinct) of one layer."""

    @abstractmethod
    def get_kv(
        self, layer: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather `(k_SGD, v_SGE)` of one layer in the order of `slots`, as `dtype`."""

    @abstractmethod
    def size_bytes(self) -> tuple[int, int]:
        """Bytes of memory behind the capacity, for keys and for values."""

    def _pointers(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([x.data_ptr() for x in tensors], dtype=torch.uint64, device=self.device)
