"""The hidden states that pooling reads, collected over the forwards of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from epd.models.pieces import Piece, to_device
from epd.models.pooling import Pooling


@dataclass(frozen=True, slots=True)
class Hidden:
    """Last hidden states `[sum(lengths), hidden_size]`, sequences in the order in which they were given.

    Goes as it is to `epd.models.pooling.pool(states, lengths, pooling)`.
    """

    states: torch.Tensor
    lengths: tuple[int, ...]


class HiddenCollector:
    """Keeps the rows that `pooling` reads of each forward, and puts them in order at the end."""

    def __init__(self, lengths: Sequence[int], pooling: Pooling) -> None:
        self._lengths = tuple(lengths)
        self.pooling = pooling
        self._states: list[torch.Tensor] = []
        self._kept: list[Piece] = []

    def add(self, pieces: Sequence[Piece], hidden_TH: torch.Tensor) -> None:
        """Take over one forward's hidden states."""
        rows, done = [], 0
        for piece in pieces:
            kept = self._part(piece)
            if kept.num_tokens:
                rows.append(np.arange(kept.start, kept.end) - piece.start + done)
                self._kept.append(kept)
            done += piece.num_tokens
        if rows:
            index = np.concatenate(rows)
            whole = len(index) == len(hidden_TH)
            self._states.append(
                hidden_TH if whole else hidden_TH.index_select(0, to_device(index, hidden_TH.device))
            )

    def collect(self) -> Hidden:
        """All sequences' rows, once every piece was added."""
        states = torch.cat(self._states) if len(self._states) > 1 else self._states[0]
        order = sorted(range(len(self._kept)), key=lambda i: (self._kept[i].index, self._kept[i].start))
        counts = [piece.num_tokens for piece in self._kept]
        if order != list(range(len(order))):
            starts = np.cumsum([0, *counts])
            index = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
            states = states.index_select(0, to_device(index, states.device))
        return Hidden(states, self._lengths if self.pooling == "mean" else (1,) * len(self._lengths))

    def _part(self, piece: Piece) -> Piece:
        """The tokens of a piece that are wanted; none when start equals end."""
        if self.pooling == "mean":
            return piece
        wanted = 0 if self.pooling == "first" else self._lengths[piece.index] - 1
        inside = piece.start <= wanted < piece.end
        return Piece(piece.index, wanted, wanted + 1) if inside else Piece(piece.index, 0, 0)
