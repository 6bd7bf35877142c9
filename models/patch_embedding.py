"""The first layer of a vision tower, for still pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class PatchEmbedding(nn.Module):
    """A convolution whose kernel covers exactly one patch, as the matrix product that it is.

    A still picture repeats its frame along the kernel's time axis, so the kernel is summed over time and
    bytes travel once. Sums and products are taken in float32 whatever the model's dtype.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    table: torch.Tensor

    def __init__(self, convolution: nn.Conv3d, table: torch.Tensor) -> None:
        """`table`: float32 `[3, 256]`, the value of each byte of each channel."""
        super().__init__()
        kernel, bias = convolution.weight.detach(), convolution.bias
        assert bias is not None
        self._dtype = kernel.dtype
        self._channels = kernel.shape[1]
        # The original rounds pixels to the model's dtype before it multiplies.
        values = table.to(kernel.device, kernel.dtype).float()
        self.register_buffer("weight", kernel.float().sum(2).flatten(1), persistent=False)
        self.register_buffer("bias", bias.detach().float(), persistent=False)
        self.register_buffer("table", values, persistent=False)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """uint8 `[N, channels * patch_size**2]` -> `[N, hidden_size]` in the model's dtype."""
        places = patches.view(len(patches), self._channels, -1).int()
        places += torch.arange(self._channels, device=patches.device, dtype=torch.int32)[:, None] * 256
        pixels = self.table.flatten().index_select(0, places.flatten()).view(len(patches), -1)
        return F.linear(pixels, self.weight, self.bias).to(self._dtype)
