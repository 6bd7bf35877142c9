"""M-RoPE positions against transformers' own."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3VLModel

from epd.cache.types import MediaGrid
from epd.models.positions import mrope_positions
from epd.models.types import MediaSpan, TokenSequence

MERGE = 2


def theirs(sequence: TokenSequence) -> torch.Tensor:
    """transformers' `get_rope_index`, called without a model."""
    vision = types.SimpleNamespace(spatial_merge_size=MERGE)
    stub = types.SimpleNamespace(config=types.SimpleNamespace(vision_config=vision))
    stub.get_vision_position_ids = functools.partial(Qwen3VLModel.get_vision_position_ids, stub)
    kinds = torch.zeros(1, sequence.num_tokens, dtype=torch.int)
    for span in sequence.spans:
        kinds[0, span.start : span.start + span.length] = 1
    grids = [[span.grid.t, span.grid.h, span.grid.w] for span in sequence.spans]
    positions, _ = Qwen3VLModel.get_rope_index(
        stub,
        input_ids=torch.from_numpy(sequence.token_ids)[None],
        mm_token_type_ids=kinds,
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    result: torch.Tensor = positions[:, 0]
    return result


def lay(texts: Sequence[int], grids: Sequence[MediaGrid]) -> TokenSequence:
    """`texts[0]` text tokens, the first picture, `texts[1]` text tokens, ..."""
    spans, start = [], texts[0]
    for grid, text in zip(grids, texts[1:], strict=True):
        spans.append(MediaSpan(start, grid.num_tokens(MERGE), grid))
        start += grid.num_tokens(MERGE) + text
    return TokenSequence(np.zeros(start, dtype=np.int64), tuple(spans))


def test_a_known_sequence() -> None:
    """Two text tokens, a picture of 2 x 3 merged tokens, two more text tokens: by hand."""
    expected = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert mrope_positions(lay([2, 2], [MediaGrid(1, 4, 6)]), MERGE).tolist() == expected


side = st.integers(1, 9).map(lambda n: MERGE * n)
layouts = st.lists(
    st.tuples(st.builds(MediaGrid, st.integers(1, 3), side, side), st.integers(1, 9)), max_size=4
)


@given(first=st.integers(1, 9), rest=layouts)
@settings(max_examples=100, deadline=None)
def test_equal_to_get_rope_index(first: int, rest: list[tuple[MediaGrid, int]]) -> None:
    """Any number of pictures of any grid between any texts: exactly transformers' positions."""
    sequence = lay([first, *(text for _, text in rest)], [grid for grid, _ in rest])
    np.testing.assert_array_equal(mrope_positions(sequence, MERGE), theirs(sequence).numpy())
