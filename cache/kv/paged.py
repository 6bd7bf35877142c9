"""The KV pool with memory behind it."""

from __future__ import annotations

import logging

import torch

from epd.cache.kv.base import KVPool, KVShape

logger = logging.getLogger(__name__)

# Largest finite value of float8_e4m3fn; beyond it a cast gives NaN.
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class PagedKVPool(KVPool):
    """Multi-head and grouped-query keys and values of every layer, in the model's dtype or fp8 e4m3.

    model_dtype: what layers hand in. dtype: what is stored; None stores the model's own.
    fp8 has no scale: values are clamped to +-448.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        page_size: int,
        max_total_tokens: int,
        model_dtype: torch.dtype,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises ValueError for a storage dtype that is neither the model's nor float8_e4m3fn."""
        dtype = dtype or model_dtype
        if dtype not in (model_dtype, torch.float8_e4m3fn):
            raise ValueError(
                f"KV storage dtype {dtype} is neither the model's {model_dtype} nor float8_e4m3fn"
            )
        device = torch.device(device)
        super().__init__(
            shape, page_size=page_size, max_total_tokens=max_total_tokens, dtype=dtype, device=device
        )
        self._verbatim = dtype == model_dtype
        layers, rows = range(shape.num_layers), (self.num_tokens, shape.num_kv_heads)
        self._k = [torch.zeros(*rows, shape.head_dim_k, dtype=dtype, device=device) for _ in layers]
        self._v = [torch.zeros(*rows, shape.head_dim_v, dtype=dtype, device=device) for _ in layers]
        k_bytes, v_bytes = self.size_bytes()
        logger.info(
            "KV pool allocated: %d tokens in %d pages of %d, %s, K %d bytes, V %d bytes",
            self.num_tokens,
            self.num_pages,
            page_size,
            dtype,
            k_bytes,
            v_bytes,
        )

    @property
    def stores_verbatim(self) -> bool:
        return self._verbatim

    def set_kv(self, layer: int, slots: torch.Tensor, k_TGD: torch.Tensor, v_TGE: torch.Tensor) -> None:
        """See `KVPool.set_kv`: one vectorised copy each for keys and values."""
        for stored, new in ((self._k[layer], k_TGD), (self._v[layer], v_TGE)):
            if self._verbatim:
                stored.index_copy_(0, slots, new)
            else:
                small = new.clamp(-_FP8_MAX, _FP8_MAX).to(self.dtype)
                stored.view(torch.uint8).index_copy_(0, slots, small.view(torch.uint8))

    def get_kv(
        self, layer: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVPool.get_kv`: one vectorised gather each for keys and values."""
        stored = (self._k[layer], self._v[layer])
        if self._verbatim:
            k, v = (x.index_select(0, slots) for x in stored)
        else:
            k, v = (x.view(torch.uint8).index_select(0, slots).view(self.dtype).to(dtype) for x in stored)
        return k, v

    def size_bytes(self) -> tuple[int, int]:
        return sum(x.nbytes for x in self._k), sum(x.nbytes for x in self._v)
