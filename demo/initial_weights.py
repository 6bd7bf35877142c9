"""Starting weights from which the demo model learns within minutes on one core."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

_NUM_FREQUENCIES = 4  # per axis
_EDGE_GAIN = 3.0  # of the filters that see change over those that see the mean
_EMBEDDING_STD = 0.05
_POSITION_STD = 1.0  # places must tell at once: a shape is where its colour is
_LARGEST_STD = 0.08


def initialise(model: Qwen3VLForConditionalGeneration, seed: int) -> None:
    """Neutral norms and biases, small matrices, cosine filters in the patch embedding; in place.

    White noise in the patch embedding learns colours but, within minutes, no shapes.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(float("norm" in name and name.endswith("weight")))
            elif "pos_embed" in name:
                parameter.normal_(0, _POSITION_STD, generator=generator)
            elif "embed_tokens" in name:
                parameter.normal_(0, _EMBEDDING_STD, generator=generator)
            else:
                std = min(_LARGEST_STD, parameter[0].numel() ** -0.5)
                parameter.normal_(0, std, generator=generator)
        _cosine_filters(model.model.visual.patch_embed.proj.weight, generator)


def _cosine_filters(weight: nn.Parameter, generator: torch.Generator) -> None:
    """Fill `weight [D, 3, frames, P, P]` with random mixes of each channel's lowest cosine filters.

    The filters are those of the two-dimensional discrete cosine transform, type II.
    """
    _, channels, frames, side, _ = weight.shape
    place = (torch.arange(side) + 0.5) * math.pi / side
    waves_FP = torch.stack([torch.cos(place * frequency) for frequency in range(_NUM_FREQUENCIES)])
    filters_FFPP = waves_FP[:, None, :, None] * waves_FP[None, :, None, :] / side**2
    gain_FF = torch.full((_NUM_FREQUENCIES, _NUM_FREQUENCIES), 2 * _EDGE_GAIN)
    gain_FF[0, 0] = 1.0
    filters_KPP = (filters_FFPP * gain_FF[:, :, None, None]).flatten(0, 1)
    mix_DCK = torch.randn(len(weight), channels, len(filters_KPP), generator=generator) / math.sqrt(channels)
    mixed_DCPP = torch.einsum("dck,kpq->dcpq", mix_DCK, filters_KPP) / frames
    weight.copy_(mixed_DCPP[:, :, None].expand_as(weight))
