"""The checkpoint's tokenizer, safe for text that users write."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem

Ids = npt.NDArray[np.int64]


class TextTokenizer:
    """Tokenises the text between special tokens. Safe to call from several threads.

    Special tokens are cut out before anything else looks at the text, so the text between two of them
    gives the same tokens alone as within the whole. In the text itself they are spelled out as literal text.
    `prefix` and `suffix`: the ids that the tokenizer puts around every text (add_special_tokens=True).
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError when the checkpoint has no tokenizer of the `tokenizers` library."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read the tokenizer of {checkpoint.name}: {error}") from error
        if not tokenizer.is_fast:
            raise CheckpointError(f"the tokenizer of {checkpoint.name} is none of the `tokenizers` library")
        self._name = checkpoint.name
        self._tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self.prefix, self.suffix = map(as_ids, _additions(tokenizer))

    def special(self, token: str) -> int:
        """Id of a special token. Raises CheckpointError when the tokenizer has no such token."""
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise CheckpointError(f"the tokenizer of {self._name} has no token {token}")
        return int(number)

    def encode(self, text: str) -> Ids:
        """Ids of `text` alone, without prefix and suffix. Raises InvalidItem for lone surrogates."""
        return as_ids(self._encoding(text).ids)

    def count_before(self, text: str, character: int) -> int:
        """How many tokens of `text` start before its character number `character`."""
        return sum(start < character for start, _ in self._encoding(text).offsets)

    def _encoding(self, text: str) -> Encoding:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidItem("a text is not valid Unicode: it holds a lone surrogate") from None
        return self._tokenizer.encode(text, add_special_tokens=False)


def as_ids(values: Sequence[int]) -> Ids:
    """An int64 array."""
    return np.array(values, dtype=np.int64)


def _additions(tokenizer: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text, seen on a text of one letter."""
    assert callable(tokenizer)
    whole = list(tokenizer("x", truncation=False, padding=False)["input_ids"])
    bare = list(tokenizer("x", truncation=False, padding=False, add_special_tokens=False)["input_ids"])
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise AssertionError(f"{whole} does not hold {bare}")
