"""M-RoPE positions from token spans and grids alone: no weights, no pixels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from epd.models.types import TokenSequence


def mrope_positions(sequence: TokenSequence, merge_size: int) -> npt.NDArray[np.int64]:
    """int64 `[3, T]`: time, height and width of every token. Equal to transformers' `get_rope_index`.

    Text advances all three together. A picture's tokens lie on its merged grid, counted from where the
    text before it ended; the text after it goes on from there by the longer side of that grid.
    """
    out = np.empty((3, sequence.num_tokens), dtype=np.int64)
    position = done = 0
    for span in sequence.spans:
        t, h, w = span.grid.t, span.grid.h // merge_size, span.grid.w // merge_size
        assert span.length == t * h * w, (span, merge_size)
        position = _fill_text(out, done, span.start, position)
        done = span.start + span.length
        axes = np.indices((t, h, w), dtype=np.int64).reshape(3, -1)
        np.add(axes, position, out=out[:, span.start : done])
        position += max(h, w)
    _fill_text(out, done, sequence.num_tokens, position)
    return out


def _fill_text(out: npt.NDArray[np.int64], start: int, end: int, position: int) -> int:
    """Number the tokens `start .. end - 1` from `position` on; returns the next position."""
    out[:, start:end] = np.arange(position, position + end - start)
    return position + end - start
