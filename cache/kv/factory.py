"""Settings to a pool."""

from __future__ import annotations

import torch

from epd.cache.kv.base import KVPool, KVShape
from epd.cache.kv.checks import storage_dtype
from epd.cache.kv.noop import NoOpKVPool
from epd.cache.kv.paged import PagedKVPool
from epd.cache.kv.settings import KVSettings


def make_pool(
    settings: KVSettings, shape: KVShape, model_dtype: torch.dtype, device: torch.device | str
) -> KVPool:
    """The pool of `kv_cache`, with the same capacity in tokens either way."""
    if settings.kv_cache == "none":
        return NoOpKVPool(
            shape,
            page_size=settings.page_size,
            max_total_tokens=settings.max_total_tokens,
            model_dtype=model_dtype,
            device=device,
        )
    return PagedKVPool(
        shape,
        page_size=settings.page_size,
        max_total_tokens=settings.max_total_tokens,
        model_dtype=model_dtype,
        dtype=storage_dtype(settings),
        device=device,
    )
