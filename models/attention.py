"""The bridge between transformers' layers and an `AttentionPass`."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import AttentionInterface

from epd.kernels.attention.base import AttentionPass

# transformers builds no mask for a name that it does not know, which is what a packed batch needs; a name
# with "flash" in it would change how the layers call.
IMPLEMENTATION = "epd_packed"


class AttentionModule(Protocol):
    """What an attention layer of transformers tells about itself."""

    layer_idx: int
    is_causal: bool


def attend_packed(
    module: AttentionModule,
    q_1HTD: torch.Tensor,
    k_1GTD: torch.Tensor,
    v_1GTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_pass: AttentionPass,
    sliding_window: int | None = None,
    **unused: object,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers; returns `o_1THE` and no weights.

    `attention_pass` comes as a keyword of the model's forward.
    """
    assert attention_mask is None, "a packed batch has no mask"
    q_THD, k_TGD, v_TGE = (x[0].transpose(0, 1) for x in (q_1HTD, k_1GTD, v_1GTE))
    o_THE = attention_pass.attend(
        module.layer_idx,
        q_THD,
        k_TGD,
        v_TGE,
        causal=module.is_causal,
        scale=scaling,
        window=sliding_window,
    )
    return o_THE[None], None


AttentionInterface.register(IMPLEMENTATION, attend_packed)
