"""Hidden states to vectors."""

from __future__ import annotations

import pytest
import torch

from epd.models.pooling import Pooling, finish, pool

HIDDEN = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("last", [[1, 2], [7, 8]]),
        ("first", [[1, 2], [3, 4]]),
        ("mean", [[1, 2], [5, 6]]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool(pooling: Pooling, expected: list[list[float]], dtype: torch.dtype) -> None:
    """One float32 vector for each sequence of the packed batch."""
    pooled = pool(HIDDEN.to(dtype), [1, 3], pooling)
    assert pooled.dtype == torch.float32
    assert pooled.tolist() == expected


def test_finish_cuts_then_normalises() -> None:
    """The length is 1 over the values that are kept."""
    assert finish(torch.tensor([3.0, 4.0, 12.0]), 2).tolist() == pytest.approx([0.6, 0.8])
    assert finish(torch.tensor([[3.0, 4.0]])).tolist()[0] == pytest.approx([0.6, 0.8])
    assert finish(torch.tensor([3.0, 4.0]), 1, normalize=False).tolist() == [3.0]


@pytest.mark.parametrize("dimensions", [0, -1, 3])
def test_dimensions_out_of_range_are_refused(dimensions: int) -> None:
    """The error names the range."""
    with pytest.raises(ValueError, match=f"between 1 and 2, got {dimensions}"):
        finish(torch.tensor([3.0, 4.0]), dimensions)
