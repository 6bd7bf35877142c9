"""Items to token sequences: the interface, and the way past it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from epd.cache.types import MediaGrid
from epd.models.errors import InvalidItem
from epd.models.types import TokenSequence


class Prompt(Protocol):
    """A family's template with its tokenizer: no weights, no pixels. Safe to call from several threads."""

    def render(
        self,
        parts: Sequence[str | MediaGrid],
        instruction: str | None = None,
        *,
        max_tokens: int | None = None,
    ) -> TokenSequence:
        """One item, its parts in the order given; placeholders for its pictures are expanded.

        `max_tokens`: shorten the user's text from its end until the sequence is that short.
        Raises InvalidItem for an item that is empty or of a kind that the family does not take, for
        text that is not valid Unicode, and when the sequence is too long even without the user's text.
        """


def from_token_ids(token_ids: Sequence[int], vocab_size: int) -> TokenSequence:
    """The caller's own ids, past any template. Raises InvalidItem when there is none or one out of range."""
    if not token_ids:
        raise InvalidItem("the item is empty")
    if not all(0 <= token < vocab_size for token in token_ids):
        raise InvalidItem(f"token ids must be between 0 and {vocab_size - 1}")
    return TokenSequence(np.array(token_ids, dtype=np.int64))
