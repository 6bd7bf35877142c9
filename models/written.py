"""A prompt as it is written down: special tokens, placeholders, and text that joins up between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from epd.cache.types import MediaGrid
from epd.models.errors import InvalidItem
from epd.models.tokenizer import TextTokenizer
from epd.models.types import MediaSpan, TokenSequence


@dataclass(slots=True)
class _Text:
    """Neighbouring text, tokenised as one; the user's begins at character `fixed`."""

    text: str
    fixed: int


@dataclass(slots=True)
class _Piece:
    ids: npt.NDArray[np.int64]
    grid: MediaGrid | None = None
    spare: int = 0  # tokens at its end that truncation may take


class Written:
    """Collects the pieces of one prompt in order, then makes them a token sequence.

    Text is tokenised whole between special tokens, since byte pairs may merge across the border between the
    template's text and the user's.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[_Text | _Piece] = []

    def add_token(self, token: int) -> None:
        """A special token."""
        self._pieces.append(_Piece(np.array([token], dtype=np.int64)))

    def add_media(self, token: int, grid: MediaGrid, num_tokens: int) -> None:
        """`num_tokens` placeholders that a picture's rows will fill."""
        self._pieces.append(_Piece(np.full(num_tokens, token, dtype=np.int64), grid))

    def add_text(self, text: str) -> None:
        """Text of the template."""
        last = self._last_text()
        last.text += text
        last.fixed = len(last.text)

    def add_users_text(self, text: str) -> None:
        """Text that truncation may shorten, and in which special tokens are literal."""
        self._last_text().text += text

    def sequence(self, max_tokens: int | None = None) -> TokenSequence:
        """What was written, within the tokenizer's prefix and suffix.

        `max_tokens`: the user's text loses tokens from its end, the last text first, until the sequence is
        that short. A token that the user's text shares with the template stays.
        Raises InvalidItem when that is not enough.
        """
        pieces = list(self._tokenised())
        if max_tokens is not None:
            _shorten(pieces, max_tokens)
        spans, start = [], 0
        for piece in pieces:
            if piece.grid is not None:
                spans.append(MediaSpan(start, len(piece.ids), piece.grid))
            start += len(piece.ids)
        return TokenSequence(np.concatenate([piece.ids for piece in pieces]), tuple(spans))

    def _last_text(self) -> _Text:
        if self._pieces and isinstance(last := self._pieces[-1], _Text):
            return last
        self._pieces.append(fresh := _Text("", 0))
        return fresh

    def _tokenised(self) -> Iterator[_Piece]:
        yield _Piece(np.array(self._tokenizer.prefix, dtype=np.int64))
        for piece in self._pieces:
            if isinstance(piece, _Piece):
                yield piece
            else:
                encoded = self._tokenizer.encode(piece.text)
                kept = int(np.searchsorted(encoded.starts, piece.fixed))
                yield _Piece(encoded.ids, spare=len(encoded.ids) - kept)
        yield _Piece(np.array(self._tokenizer.suffix, dtype=np.int64))


def _shorten(pieces: list[_Piece], max_tokens: int) -> None:
    over = sum(len(piece.ids) for piece in pieces) - max_tokens
    for piece in reversed(pieces):
        if (taken := min(over, piece.spare)) > 0:
            piece.ids = piece.ids[: len(piece.ids) - taken]
            over -= taken
    if over > 0:
        raise InvalidItem(
            f"the item has {max_tokens + over} tokens without its text, over the limit of {max_tokens}"
        )
