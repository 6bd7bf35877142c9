"""Which backend computes a batch."""

from __future__ import annotations

from functools import cache

import torch

from epd.kernels.attention.base import Backend
from epd.kernels.attention.flash import FlashAttention
from epd.kernels.attention.grouped import GroupedSDPA
from epd.kernels.attention.torch_varlen import TorchVarlen

# flash-attn 2: fp16 and bf16, heads of at most 256.
_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_FLASH_HEAD_SIZE = 256

GROUPED = GroupedSDPA()


@cache
def _cuda_varlen() -> Backend | None:
    return FlashAttention.find() or TorchVarlen.find()


def backend_for(q_THD: torch.Tensor, v_SGE: torch.Tensor) -> Backend:
    """flash-attn, else torch's varlen, where CUDA kernels take the batch; grouped SDPA elsewhere."""
    if (
        q_THD.device.type == "cuda"
        and q_THD.dtype in _FLASH_DTYPES
        and max(q_THD.shape[2], v_SGE.shape[2]) <= _FLASH_HEAD_SIZE
    ):
        return _cuda_varlen() or GROUPED
    return GROUPED
