"""Packed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epd.cache.types import MediaGrid
from epd.models.packing import pack, row_starts
from epd.models.types import MediaSpan, TokenSequence

TEXT = TokenSequence(np.array([5, 6, 7]))
PICTURES = TokenSequence(
    np.array([1, 9, 9, 2, 9, 9, 9, 9, 3]),
    (MediaSpan(1, 2, MediaGrid(1, 2, 4)), MediaSpan(4, 4, MediaGrid(1, 4, 4))),
)


def test_sequences_lie_end_to_end() -> None:
    """Ids, lengths and positions in the order given; text counts up from 0 in every sequence."""
    batch = pack([TEXT, PICTURES, TEXT], "cpu", merge_size=2)
    assert batch.token_ids.tolist() == [5, 6, 7, 1, 9, 9, 2, 9, 9, 9, 9, 3, 5, 6, 7]
    assert (batch.lengths, batch.num_tokens) == ((3, 9, 3), 15)
    assert batch.positions[:, :3].tolist() == batch.positions[:, -3:].tolist() == [[0, 1, 2]] * 3
    assert batch.positions[0].tolist()[3:12] == [0, 1, 1, 3, 4, 4, 4, 4, 6]


def test_rows_have_a_place() -> None:
    """media_index holds the packed position of every row, and row_starts where each picture's rows begin."""
    batch = pack([TEXT, PICTURES, PICTURES], "cpu", merge_size=2)
    assert batch.media_index is not None
    assert batch.media_index.tolist() == [4, 5, 7, 8, 9, 10, 13, 14, 16, 17, 18, 19]
    assert row_starts([TEXT, PICTURES, PICTURES]) == [0, 2, 6, 8]
    assert batch.with_rows(torch.zeros(12, 8)).media_rows is not None


def test_text_alone_has_no_rows() -> None:
    """Neither index nor rows."""
    batch = pack([TEXT], "cpu")
    assert batch.media_index is None
    assert batch.media_rows is None
    assert row_starts([TEXT]) == []


@pytest.mark.parametrize("number", [11, 13])
def test_a_wrong_number_of_rows_is_refused(number: int) -> None:
    """Each place needs exactly one row."""
    batch = pack([PICTURES, PICTURES], "cpu", merge_size=2)
    with pytest.raises(ValueError, match=f"{number} rows for 12 places"):
        batch.with_rows(torch.zeros(number, 8))


@pytest.mark.parametrize("sequences", [[], [TokenSequence(np.array([], dtype=np.int64))]])
def test_nothing_to_pack_is_refused(sequences: list[TokenSequence]) -> None:
    """No sequence, or an empty one."""
    with pytest.raises(ValueError, match="at least one"):
        pack(sequences, "cpu")
