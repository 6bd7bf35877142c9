"""Rows as arrays, for whoever sends them elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epd.cache.types import RowLayout


def rows_to_numpy(rows: torch.Tensor) -> npt.NDArray[Any]:
    """`rows` `[n, row_dim]` on the host, not copied; bfloat16, which numpy has not, as bits in uint16."""
    return (rows.view(torch.uint16) if rows.dtype is torch.bfloat16 else rows).numpy()


def rows_from_numpy(array: npt.NDArray[Any], layout: RowLayout) -> torch.Tensor:
    """Inverse of `rows_to_numpy`. Raises ValueError when the array holds no rows of `layout`."""
    expected: Any = (
        np.uint16 if layout.dtype is torch.bfloat16 else torch.empty(0, dtype=layout.dtype).numpy().dtype
    )
    if array.ndim != 2 or array.shape[1] != layout.row_dim or array.dtype != expected:
        raise ValueError(
            f"rows of {layout.row_dim} values of {layout.dtype} were expected, "
            f"got {array.dtype} {array.shape}"
        )
    writable = array if array.flags.writeable else array.copy()
    return torch.from_numpy(writable).view(layout.dtype)
