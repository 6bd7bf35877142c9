"""Where the rows of an entry lie: as memory for a store, and as row ranges for a copy.

An entry's rows fill its page runs in order; the last page may be filled in part, and runs past
`num_tokens` hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from epd.cache.entry import Buffer
from epd.cache.types import PageRun


def row_ranges(runs: Iterable[PageRun], page_tokens: int, num_tokens: int) -> Iterator[tuple[int, int]]:
    """`(first row in the pool, number of rows)` of each run that holds rows. ValueError when too short."""
    left = num_tokens
    for run in runs:
        if not left:
            return
        length = min(left, run.length * page_tokens)
        yield run.start * page_tokens, length
        left -= length
    if left:
        raise ValueError(f"the page runs hold {num_tokens - left} rows, the entry has {num_tokens}")


def storage_buffers(
    runs: Iterable[PageRun], page_tokens: int, num_tokens: int, row_bytes: int, rows_pointer: int
) -> list[Buffer]:
    """`(pointer, size)` per run, exactly the entry's bytes. `rows_pointer`: of row 0 of the pool."""
    return [
        (rows_pointer + start * row_bytes, length * row_bytes)
        for start, length in row_ranges(runs, page_tokens, num_tokens)
    ]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Row ranges `src[s : s + n] -> dst[d : d + n]` for `transfer_ranges`."""

    src_starts: list[int] = field(default_factory=list)
    dst_starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, src_start: int, dst_start: int, length: int) -> None:
        self.src_starts.append(src_start)
        self.dst_starts.append(dst_start)
        self.lengths.append(length)

    @property
    def is_empty(self) -> bool:
        return not self.lengths


def host_to_device_plan(entries: Iterable[tuple[Sequence[PageRun], int, int]], page_tokens: int) -> CopyPlan:
    """From the pool to packed rows. `entries`: `(runs, num_tokens, first destination row)` of each entry."""
    plan = CopyPlan()
    for runs, num_tokens, dst_start in entries:
        for start, length in row_ranges(runs, page_tokens, num_tokens):
            plan.add(start, dst_start, length)
            dst_start += length
    return plan


def device_to_host_plan(runs: Sequence[PageRun], page_tokens: int, num_tokens: int) -> CopyPlan:
    """From an entry's rows, laid end to end from row 0, to its pages in the pool."""
    plan = CopyPlan()
    src_start = 0
    for start, length in row_ranges(runs, page_tokens, num_tokens):
        plan.add(src_start, start, length)
        src_start += length
    return plan
