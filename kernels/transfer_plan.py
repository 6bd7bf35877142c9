"""Which bytes of one row table go where in another: checked, merged and turned into addresses once.

Nothing here knows of tensors or devices: rows are numbered, and an address is an integer.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from operator import index
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from epd.kernels.batch_copy import CopyPath, Driver

Int64Array = npt.NDArray[np.int64]
RowNumbers = Sequence[int] | npt.NDArray[np.integer]

# Row numbers at or above this are refused before sums are taken, so that no sum wraps around.
_NUM_ROWS_LIMIT = 1 << 62


class TransferPlan:
    """Ranges `src[s : s + n] -> dst[d : d + n]` for each `(s, d, n)`, built once and reused.

    Empty ranges are dropped. Ranges that are neighbours on both sides are merged, in whatever order
    they were given. A plan may be shared by threads and used on any tensors that have the rows.

    Raises ValueError, naming the range, for lists of unequal length, negative numbers and
    destinations that overlap. Bounds need the tables: see `check_bounds`.
    """

    def __init__(self, src_starts: RowNumbers, dst_starts: RowNumbers, lengths: RowNumbers) -> None:
        self._given = _row_numbers(src_starts, dst_starts, lengths)
        self._largest = _largest(self._given)
        if max(self._largest) >= _NUM_ROWS_LIMIT:
            self._given = _one_by_one(dst_starts, src_starts, lengths)
        self._table = _merge(self._given)
        self._lock = Lock()
        self._addresses: Int64Array = np.empty(self._table.shape, dtype=np.int64)

    @property
    def num_ranges(self) -> int:
        """Ranges left after merging."""
        return len(self._table[0])

    @property
    def num_rows(self) -> int:
        """Rows copied in all."""
        return int(self._table[2].sum())

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """`(src_start, dst_start, length)` of each merged range, by destination."""
        dst, src, length = self._table.tolist()
        return zip(src, dst, length, strict=True)

    def check_bounds(self, src_rows: int, dst_rows: int) -> None:
        """Raises ValueError, naming the first range that leaves tables of that many rows."""
        largest_dst, largest_src, largest_length = self._largest
        if largest_src + largest_length <= src_rows and largest_dst + largest_length <= dst_rows:
            return
        dst, src, length = self._given
        for side, starts, num_rows in (("source", src, src_rows), ("destination", dst, dst_rows)):
            outside = starts > num_rows - length
            if np.count_nonzero(outside):
                i = int(outside.argmax())
                raise ValueError(f"range {i}: {side} rows {_rows(starts[i], length[i])} of {num_rows}")

    def submit(
        self,
        driver: Driver,
        src_address: int,
        dst_address: int,
        row_bytes: int,
        stream: int,
        device: int,
        *,
        batch: bool = True,
        any_order: bool = False,
    ) -> CopyPath:
        """Hands all ranges to `driver` and returns without waiting for the copies.

        Addresses are those of row 0; the caller has checked the bounds. `stream` is a CUstream handle,
        `device` the ordinal it belongs to. `batch=False` forces one call per range. `any_order` lets the
        driver read the source before earlier work of the stream is done. Returns the path taken.
        Raises RuntimeError, naming the driver's error, after the stream was waited for.
        """
        if not self._table.size or not row_bytes:
            return driver.path
        with self._lock:
            return driver.copy(
                self._table,
                self._addresses,
                src_address,
                dst_address,
                row_bytes,
                stream,
                device,
                batch,
                any_order,
            )


def _row_numbers(src_starts: RowNumbers, dst_starts: RowNumbers, lengths: RowNumbers) -> Int64Array:
    """`[3, n]` of destination starts, source starts and lengths, as given."""
    num_ranges = len(lengths)
    if not len(src_starts) == len(dst_starts) == num_ranges:
        raise ValueError(
            f"src_starts, dst_starts and lengths must be equally long, "
            f"got {len(src_starts)}, {len(dst_starts)} and {num_ranges}"
        )
    if isinstance(src_starts, np.ndarray):
        table = np.array((dst_starts, src_starts, lengths))
        if table.dtype == np.int64 and table.ndim == 2:
            return table
        return _one_by_one(dst_starts, src_starts, lengths)
    try:
        # Of all ways from lists to an array the quickest, and it takes nothing but integers of 64 bits.
        packed = struct.pack(f"{3 * num_ranges}q", *dst_starts, *src_starts, *lengths)
    except struct.error:
        return _one_by_one(dst_starts, src_starts, lengths)
    return np.frombuffer(packed, dtype=np.int64).reshape(3, num_ranges)


def _largest(table: Int64Array) -> list[int]:
    """Largest number of each row; a negative one counts as larger than any other."""
    largest: list[int] = np.maximum.reduce(table.view(np.uint64), axis=1, initial=0).tolist()
    return largest


def _one_by_one(*columns: RowNumbers) -> Int64Array:
    """`[3, n]` from rare kinds of integers. Raises ValueError, naming the range, for other things."""
    names = ("dst_starts", "src_starts", "lengths")
    checked = [
        [_row_number(name, i, n) for i, n in enumerate(c)] for name, c in zip(names, columns, strict=True)
    ]
    return np.array(checked, dtype=np.int64)


def _row_number(name: str, i: int, number: object) -> int:
    try:
        value = index(number)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise ValueError(f"range {i}: {name} holds {number!r}, not an integer") from None
    if value < 0:
        raise ValueError(f"range {i}: {name} {value} is negative")
    if value >= _NUM_ROWS_LIMIT:
        raise ValueError(f"range {i}: {name} {value} is out of bounds")
    return value


def _merge(given: Int64Array) -> Int64Array:
    """The same columns by destination, merged, none empty."""
    order = given[0].argsort(kind="stable")
    if np.count_nonzero(given[2]) != order.size:
        order = order[given[2][order] > 0]
    table: Int64Array = given.take(order, axis=1)
    dst, length = table[0], table[2]
    gap = dst[1:] - (dst + length)[:-1]
    smallest = np.minimum.reduce(gap, initial=1)
    if smallest > 0:
        return table
    if smallest < 0:
        i = int(gap.argmin())
        first, second = sorted((i, i + 1), key=order.__getitem__)
        rows = " and ".join(_rows(dst[k], length[k]) for k in (second, first))
        raise ValueError(
            f"range {order[second]}: destination overlaps that of range {order[first]} (rows {rows})"
        )
    src_gap = table[1, 1:] - (table[1] + length)[:-1]
    firsts = np.flatnonzero(np.concatenate(([True], (gap != 0) | (src_gap != 0))))
    merged: Int64Array = table.take(firsts, axis=1)
    merged[2] = np.add.reduceat(length, firsts)
    return merged


def _rows(start: np.int64, length: np.int64) -> str:
    return f"{start}..{start + length - 1}" if length else f"{start} (none)"
