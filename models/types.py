"""The vocabulary of the model room: token sequences and packed batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from epd.cache.types import MediaGrid


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Placeholder tokens `start .. start + length - 1` of a sequence that one picture's rows fill."""

    start: int
    length: int
    grid: MediaGrid


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One item, tokenised: `token_ids [T]` int64 with placeholders expanded, and its media spans in order."""

    token_ids: npt.NDArray[np.int64]
    spans: tuple[MediaSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences laid end to end without padding, on the model's device.

    token_ids: int64 `[T]`. positions: int64 `[3, T]` (M-RoPE: time, height, width; text-only
    families read row 0). lengths: tokens of each sequence, in order. media_rows: `[V, row_dim]`, the
    rows of all pictures in packed order, or None. media_index: int64 `[V]`, the packed position
    that each row fills, ascending, or None.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lengths: tuple[int, ...]
    media_rows: torch.Tensor | None = None
    media_index: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def with_rows(self, media_rows: torch.Tensor) -> PackedBatch:
        """The same batch with its pictures' rows `[V, row_dim]`, in the order of `media_index`.

        Raises ValueError when their number is not that of the places they fill.
        """
        places = 0 if self.media_index is None else len(self.media_index)
        if len(media_rows) != places:
            raise ValueError(f"{len(media_rows)} rows for {places} places")
        return replace(self, media_rows=media_rows)
