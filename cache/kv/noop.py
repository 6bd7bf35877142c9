"""The KV pool that allocates nothing: prefill that skips never reads its keys and values back."""

from __future__ import annotations

import logging
from typing import NoReturn

import torch

from epd.cache.kv.base import KVPool, KVShape

logger = logging.getLogger(__name__)


class KVPoolAccessError(RuntimeError):
    """A batch reached for the memory that a `NoOpKVPool` does not have. Fails that batch only."""

    def __init__(self, access: str, layer: int) -> None:
        super().__init__(
            f"layer {layer} tried to {access} the no-op KV pool: `kv_cache: none` is for embedding models "
            "whose every batch skips the KV cache (no chunked prefill, no prefix cache, plain multi-head "
            "attention, skip_kv not off); use `kv_cache: paged` otherwise"
        )


class NoOpKVPool(KVPool):
    """Logical capacity without memory: the batcher sees `num_tokens` as with a paged pool.

    One placeholder page per layer and side keeps every view and pointer that an attention backend
    takes legal. Any write or read raises KVPoolAccessError.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        page_size: int,
        max_total_tokens: int,
        model_dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.device(device)
        super().__init__(
            shape, page_size=page_size, max_total_tokens=max_total_tokens, dtype=model_dtype, device=device
        )
        page = (page_size, shape.num_kv_heads)
        layers = range(shape.num_layers)
        self._k = [torch.zeros(*page, shape.head_dim_k, dtype=model_dtype, device=device) for _ in layers]
        self._v = [torch.zeros(*page, shape.head_dim_v, dtype=model_dtype, device=device) for _ in layers]
        logger.info(
            "KV pool allocates nothing: %d logical tokens, a placeholder page of %d per layer, %d bytes",
            self.num_tokens,
            page_size,
            self.placeholder_bytes,
        )

    @property
    def placeholder_bytes(self) -> int:
        """Bytes of all placeholder pages."""
        return sum(x.nbytes for x in (*self._k, *self._v))

    @property
    def stores_verbatim(self) -> bool:
        """Nothing is stored, so nothing is altered."""
        return True

    def set_kv(self, layer: int, slots: torch.Tensor, k_TGD: torch.Tensor, v_TGE: torch.Tensor) -> NoReturn:
        """Raises KVPoolAccessError."""
        raise KVPoolAccessError("write to", layer)

    def get_kv(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> NoReturn:
        """Raises KVPoolAccessError."""
        raise KVPoolAccessError("read from", layer)

    def size_bytes(self) -> tuple[int, int]:
        """`(0, 0)`: no capacity has memory behind it."""
        return 0, 0
