"""Sequences to a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from epd.models.positions import mrope_positions
from epd.models.types import PackedBatch, TokenSequence


def pack(sequences: Sequence[TokenSequence], device: torch.device | str, merge_size: int = 1) -> PackedBatch:
    """Lay `sequences` end to end on `device`.

    The batch has `media_index` but no `media_rows`: the caller allocates `[len(media_index), row_dim]`, fills
    it span by span (`row_starts`) and calls `PackedBatch.with_rows`. `merge_size`: the family's.
    Raises ValueError when there is no sequence or an empty one.
    """
    if not sequences or any(sequence.num_tokens == 0 for sequence in sequences):
        raise ValueError("a batch needs at least one sequence, and each at least one token")
    lengths = tuple(sequence.num_tokens for sequence in sequences)
    index = [
        np.arange(start + span.start, start + span.start + span.length)
        for start, sequence in zip(accumulate((0, *lengths[:-1])), sequences, strict=True)
        for span in sequence.spans
    ]
    positions = np.concatenate([mrope_positions(sequence, merge_size) for sequence in sequences], axis=1)
    return PackedBatch(
        token_ids=_put(np.concatenate([sequence.token_ids for sequence in sequences]), device),
        positions=_put(positions, device),
        lengths=lengths,
        media_index=_put(np.concatenate(index), device) if index else None,
    )


def row_starts(sequences: Sequence[TokenSequence]) -> list[int]:
    """First row in `media_rows` of every span, spans in packed order."""
    lengths = [span.length for sequence in sequences for span in sequence.spans]
    return list(accumulate((0, *lengths)))[:-1]


def _put(values: npt.NDArray[np.int64], device: torch.device | str) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
