"""A prompt as it is written down: special tokens, placeholders, and text that joins up between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from epd.cache.types import MediaGrid
from epd.models.errors import InvalidItem
from epd.models.tokenizer import Ids, TextTokenizer
from epd.models.types import MediaSpan, TokenSequence


@dataclass(slots=True)
class _Text:
    """Neighbouring text, tokenised as one; the user's begins at character `fixed`."""

    text: str
    fixed: int


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Ids that stay as they are; a picture's placeholders when there is a grid."""

    ids: Ids
    grid: MediaGrid | None = None


class Written:
    """Collects the pieces of one prompt in order, then makes them a token sequence.

    Text is tokenised whole between special tokens, since byte pairs may merge across the border between the
    template's text and the user's.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces: list[_Text | _Fixed] = []

    def add_ids(self, ids: Ids) -> None:
        """Ids of the template that begin and end with a special token."""
        self._pieces.append(_Fixed(ids))

    def add_media(self, token: int, grid: MediaGrid, num_tokens: int) -> None:
        """`num_tokens` placeholders that a picture's rows will fill."""
        self._pieces.append(_Fixed(np.full(num_tokens, token, dtype=np.int64), grid))

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
        ids = [piece.ids if isinstance(piece, _Fixed) else self._encode(piece) for piece in self._pieces]
        ids = [self._tokenizer.prefix, *ids, self._tokenizer.suffix]
        if max_tokens is not None and (over := sum(map(len, ids)) - max_tokens) > 0:
            self._shorten(ids, over, max_tokens)
        starts = accumulate(map(len, ids))
        spans = [
            MediaSpan(start, len(piece.ids), piece.grid)
            for start, piece in zip(starts, self._pieces, strict=False)
            if isinstance(piece, _Fixed) and piece.grid is not None
        ]
        return TokenSequence(np.concatenate(ids), tuple(spans))

    def _last_text(self) -> _Text:
        if self._pieces and isinstance(last := self._pieces[-1], _Text):
            return last
        fresh = _Text("", 0)
        self._pieces.append(fresh)
        return fresh

    def _encode(self, piece: _Text) -> Ids:
        return self._tokenizer.encode(piece.text)

    def _shorten(self, ids: list[Ids], over: int, max_tokens: int) -> None:
        """Take `over` ids from the users' texts; `ids[0]` is the prefix, then one entry for each piece."""
        for place, piece in reversed(list(enumerate(self._pieces, start=1))):
            if over > 0 and isinstance(piece, _Text):
                spare = len(ids[place]) - self._tokenizer.count_before(piece.text, piece.fixed)
                taken = min(over, spare)
                ids[place] = ids[place][: len(ids[place]) - taken]
                over -= taken
        if over > 0:
            raise InvalidItem(
                f"the item has {max_tokens + over} tokens without its text, over the limit of {max_tokens}"
            )
