"""Which bytes of one row table go where in another: checked, merged and turned into addresses once.

Nothing here knows of tensors or devices: rows are numbered, and an address is an integer.
"""

from __future__ import annotations

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
        src = _row_numbers("src_starts", src_starts)
        dst = _row_numbers("dst_starts", dst_starts)
        length = _row_numbers("lengths", lengths)
        if not src.size == dst.size == length.size:
            raise ValueError(
                f"src_starts, dst_starts and lengths must be equally long, "
                f"got {src.size}, {dst.size} and {length.size}"
            )
        self._given = (src, dst, length)
        bits = int(np.bitwise_or.reduce(src | dst | length))
        if not 0 <= bits < _NUM_ROWS_LIMIT:
            self._raise_unrepresentable()
        src_end, dst_end = src + length, dst + length
        self.src_rows = int(src_end.max()) if src.size else 0
        """Rows that a source must have at least."""
        self.dst_rows = int(dst_end.max()) if dst.size else 0
        """Rows that a destination must have at least."""
        self._table = _merge(src, dst, length, src_end, dst_end)
        self._lock = Lock()
        self._addresses: Int64Array | None = None
        self._addresses_of = (0, 0, 0)

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
        if self.src_rows <= src_rows and self.dst_rows <= dst_rows:
            return
        src, dst, length = self._given
        for side, starts, num_rows in (("source", src, src_rows), ("destination", dst, dst_rows)):
            outside = np.flatnonzero(starts + length > num_rows)
            if outside.size:
                i = int(outside[0])
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
        if not self.num_ranges or not row_bytes:
            return driver.path
        with self._lock:
            table = self._address_table(src_address, dst_address, row_bytes)
            return driver.copy(table, stream, device, batch, any_order)

    def _address_table(self, src_address: int, dst_address: int, row_bytes: int) -> Int64Array:
        """`[3, num_ranges]`: destination and source addresses, sizes in bytes. Kept for the next call."""
        wanted = (src_address, dst_address, row_bytes)
        if self._addresses is None:
            self._addresses = np.empty_like(self._table)
        elif self._addresses_of == wanted:
            return self._addresses
        np.multiply(self._table, row_bytes, out=self._addresses)
        self._addresses[0] += dst_address
        self._addresses[1] += src_address
        self._addresses_of = wanted
        return self._addresses

    def _raise_unrepresentable(self) -> None:
        for name, numbers in zip(("src_starts", "dst_starts", "lengths"), self._given, strict=True):
            for i, number in enumerate(numbers.tolist()):
                if not 0 <= number < _NUM_ROWS_LIMIT:
                    problem = "negative" if number < 0 else "out of bounds"
                    raise ValueError(f"range {i}: {name} {number} is {problem}")


def _row_numbers(name: str, numbers: RowNumbers) -> Int64Array:
    try:
        array = np.asarray(numbers)
        array = array.astype(np.int64, casting="safe" if array.size else "unsafe", copy=False)
    except (TypeError, ValueError, OverflowError):
        array = np.array([_row_number(name, i, n) for i, n in enumerate(numbers)], dtype=np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    return array


def _row_number(name: str, i: int, number: object) -> int:
    try:
        value = index(number)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise ValueError(f"range {i}: {name} holds {number!r}, not an integer") from None
    if not -_NUM_ROWS_LIMIT < value < _NUM_ROWS_LIMIT:
        raise ValueError(f"range {i}: {name} {value} is out of bounds")
    return value


def _merge(
    src: Int64Array, dst: Int64Array, length: Int64Array, src_end: Int64Array, dst_end: Int64Array
) -> Int64Array:
    """`[3, n]` of destination starts, source starts and lengths, by destination, merged, none empty."""
    order: npt.NDArray[np.intp] | None = None
    if not length.all():
        order = np.flatnonzero(length)
        src, dst, src_end, dst_end = src[order], dst[order], src_end[order], dst_end[order]
    if (dst[1:] < dst_end[:-1]).any():
        by_dst = dst.argsort(kind="stable")
        order = by_dst if order is None else order[by_dst]
        src, dst, src_end, dst_end = src[by_dst], dst[by_dst], src_end[by_dst], dst_end[by_dst]
        overlaps = dst[1:] < dst_end[:-1]
        if overlaps.any():
            i = int(overlaps.argmax())
            first, second = sorted((int(order[i]), int(order[i + 1])))
            ours, theirs = (_rows(dst[k], dst_end[k] - dst[k]) for k in (i, i + 1))
            raise ValueError(
                f"range {second}: destination overlaps that of range {first} (rows {ours} and {theirs})"
            )
    breaks = (src[1:] != src_end[:-1]) | (dst[1:] != dst_end[:-1])
    if not breaks.all():
        first_of = np.flatnonzero(np.concatenate(([True], breaks)))
        last_of = np.append(first_of[1:] - 1, dst.size - 1)
        src, dst, dst_end = src[first_of], dst[first_of], dst_end[last_of]
    table = np.empty((3, dst.size), dtype=np.int64)
    table[0] = dst
    table[1] = src
    np.subtract(dst_end, dst, out=table[2])
    return table


def _rows(start: np.int64, length: np.int64) -> str:
    return f"{start}..{start + length - 1}" if length else f"{start} (none)"
