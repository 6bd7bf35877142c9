"""Sequences in whole or in pieces, and their packing for one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from epd.cache.kv.prefix import KeyedSpan, page_hashes
from epd.models.types import PackedBatch, TokenSequence


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """A sequence ready to run.

    positions: int64 `[3, T]`. media_keys: the media key of each span as text, in order; it decides with
    grid and salt whether two prompts may share a prefix. salt: keeps one caller's prefixes apart from
    another's.
    """

    tokens: TokenSequence
    positions: npt.NDArray[np.int64]
    media_keys: tuple[str, ...] = ()
    salt: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError when the parts do not fit together."""
        if self.num_tokens == 0:
            raise ValueError("a sequence needs at least one token")
        if self.positions.shape != (3, self.num_tokens):
            raise ValueError(f"positions {self.positions.shape} for {self.num_tokens} tokens")
        if len(self.media_keys) != len(self.tokens.spans):
            raise ValueError(f"{len(self.media_keys)} media keys for {len(self.tokens.spans)} spans")

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    @property
    def num_rows(self) -> int:
        """Media rows that it takes."""
        return sum(span.length for span in self.tokens.spans)

    def page_hashes(self, page_size: int) -> list[bytes]:
        """See `epd.cache.kv.prefix.page_hashes`."""
        spans = [
            KeyedSpan(span.start, span.length, span.grid, key)
            for span, key in zip(self.tokens.spans, self.media_keys, strict=True)
        ]
        return page_hashes(self.tokens.token_ids, self.positions, spans, self.salt, page_size)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start .. end - 1` of the sequence `index` of a request batch."""

    index: int
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class Packer:
    """Packs pieces of one list of sequences, whose media rows lie in one tensor, spans in order."""

    def __init__(
        self, sequences: Sequence[PrefillSequence], media_rows: torch.Tensor | None, device: torch.device
    ) -> None:
        """Raises ValueError when `media_rows [V, row_dim]` is not as long as the spans want."""
        counts = [sequence.num_rows for sequence in sequences]
        given = 0 if media_rows is None else len(media_rows)
        if given != sum(counts):
            raise ValueError(f"{given} media rows for spans of {sum(counts)}")
        self._sequences = sequences
        self._rows = media_rows
        self._first_rows = list(accumulate(counts, initial=0))
        self._device = device

    def pack(self, pieces: Sequence[Piece]) -> PackedBatch:
        """Lay pieces end to end. Token ids, positions and media rows (deepstack within) are cut alike."""
        token_ids, positions, rows, places = [], [], [], []
        done = 0
        for piece in pieces:
            sequence = self._sequences[piece.index]
            token_ids.append(sequence.tokens.token_ids[piece.start : piece.end])
            positions.append(sequence.positions[:, piece.start : piece.end])
            row = self._first_rows[piece.index]
            for span in sequence.tokens.spans:
                first = max(span.start, piece.start)
                last = min(span.start + span.length, piece.end)
                if first < last:
                    rows.append(np.arange(row + first - span.start, row + last - span.start))
                    places.append(np.arange(done + first - piece.start, done + last - piece.start))
                row += span.length
            done += piece.num_tokens
        batch = PackedBatch(
            token_ids=to_device(np.concatenate(token_ids), self._device),
            positions=to_device(np.concatenate(positions, axis=1), self._device),
            lengths=tuple(piece.num_tokens for piece in pieces),
            media_index=to_device(np.concatenate(places), self._device) if places else None,
        )
        return batch.with_rows(self._pick(np.concatenate(rows))) if rows else batch

    def _pick(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Those media rows: a view where they are neighbours."""
        assert self._rows is not None
        if rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            return self._rows[int(rows[0]) : int(rows[-1]) + 1]
        return self._rows.index_select(0, to_device(rows, self._device))


def to_device(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """int64 values as a tensor on `device`, without waiting for it."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def plan_whole(
    lengths: Sequence[int], indices: Sequence[int], max_tokens: int, max_pages: int, page_size: int
) -> list[list[Piece]]:
    """Batches of whole sequences, like lengths together: at most `max_tokens` and `max_pages` each.

    `indices` name the sequences, each of which fits alone.
    """
    batches: list[list[Piece]] = []
    tokens_left = pages_left = 0
    for index in sorted(indices, key=lambda i: lengths[i]):
        tokens, pages = lengths[index], -(-lengths[index] // page_size)
        if tokens > tokens_left or pages > pages_left:
            batches.append([])
            tokens_left, pages_left = max_tokens, max_pages
        batches[-1].append(Piece(index, 0, tokens))
        tokens_left -= tokens
        pages_left -= pages
    return batches
