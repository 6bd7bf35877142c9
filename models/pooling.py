"""Hidden states to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

Pooling = Literal["last", "mean", "first"]


def pool(hidden_TH: torch.Tensor, lengths: Sequence[int], pooling: Pooling) -> torch.Tensor:
    """One float32 vector `[B, H]` for each sequence of a packed batch, on the device of `hidden_TH`.

    last: the last token's hidden state. first: the first token's. mean: the mean over all tokens.
    """
    assert sum(lengths) == hidden_TH.shape[0], (lengths, hidden_TH.shape)
    counts = torch.tensor(lengths, device=hidden_TH.device)
    if pooling == "mean":
        return torch.segment_reduce(hidden_TH.float(), "mean", lengths=counts, axis=0)
    ends = counts.cumsum(0)
    return hidden_TH.index_select(0, ends - 1 if pooling == "last" else ends - counts).float()


def finish(vectors: torch.Tensor, dimensions: int | None = None, *, normalize: bool = True) -> torch.Tensor:
    """Keep the first `dimensions` values of `[..., H]`, then scale to unit length.

    Raises ValueError when `dimensions` is not between 1 and H.
    """
    if dimensions is not None:
        if not 1 <= dimensions <= vectors.shape[-1]:
            raise ValueError(f"dimensions must be between 1 and {vectors.shape[-1]}, got {dimensions}")
        vectors = vectors[..., :dimensions]
    return F.normalize(vectors, dim=-1) if normalize else vectors
