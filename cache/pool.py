"""The memory of the cache: page-locked where there is a CUDA device to copy from and to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import finalize

import torch

from epd.cache.entry import HEADER_BYTES, Buffer
from epd.cache.plans import row_ranges, storage_buffers
from epd.cache.types import PageRun, RowLayout

_ALIGNMENT = 4096


class PagePool:
    """`num_pages` pages of `page_tokens` rows, and one header slot per page, in one piece of memory.

    An entry's header lies in the slot of its first page, so that header and rows go to a store in one
    call, from memory that is registered once. All of it is touched at the start: a pool that
    does not fit the machine fails here and not in a request.
    """

    def __init__(
        self, layout: RowLayout, page_tokens: int, num_pages: int, *, pin: bool | None = None
    ) -> None:
        """`pin`: page-lock the memory; by default when there is a CUDA device."""
        if page_tokens < 1 or num_pages < 1:
            raise ValueError(f"a pool needs pages and tokens, got {num_pages} pages of {page_tokens} tokens")
        self.layout = layout
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        rows_bytes = num_pages * self.page_bytes
        headers_at = -(-rows_bytes // _ALIGNMENT) * _ALIGNMENT
        self._unaligned = torch.zeros(headers_at + num_pages * HEADER_BYTES + _ALIGNMENT, dtype=torch.uint8)
        skipped = -self._unaligned.data_ptr() % _ALIGNMENT
        self.memory = self._unaligned[skipped : skipped + headers_at + num_pages * HEADER_BYTES]
        """uint8 `[bytes]`: all of it, to be registered with a store."""
        self.is_pinned = torch.cuda.is_available() if pin is None else pin
        if self.is_pinned:
            _lock_pages(self.memory)
            self._unlock = finalize(self, _unlock_pages, self.memory)
        self.rows = self.memory[:rows_bytes].view(layout.dtype).view(num_pages * page_tokens, layout.row_dim)
        """`[num_pages * page_tokens, row_dim]`."""
        self._rows_pointer = self.memory.data_ptr()
        self._headers: memoryview = self.memory.numpy().data[headers_at:]
        self._headers_pointer = self._rows_pointer + headers_at

    @property
    def page_bytes(self) -> int:
        return self.page_tokens * self.layout.row_bytes

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` rows fill."""
        return -(-num_tokens // self.page_tokens)

    def row_buffers(self, runs: Sequence[PageRun], num_tokens: int) -> list[Buffer]:
        """`(pointer, size)` of the rows, one per run that holds any."""
        return storage_buffers(runs, self.page_tokens, num_tokens, self.layout.row_bytes, self._rows_pointer)

    def header_buffer(self, runs: Sequence[PageRun]) -> Buffer:
        """`(pointer, size)` of the entry's header slot."""
        return (self._headers_pointer + runs[0].start * HEADER_BYTES, HEADER_BYTES)

    def read_header(self, runs: Sequence[PageRun]) -> bytes:
        at = runs[0].start * HEADER_BYTES
        return bytes(self._headers[at : at + HEADER_BYTES])

    def write_header(self, runs: Sequence[PageRun], header: bytes) -> None:
        at = runs[0].start * HEADER_BYTES
        self._headers[at : at + HEADER_BYTES] = header

    def copy_rows(self, runs: Sequence[PageRun], num_tokens: int) -> torch.Tensor:
        """A copy of an entry's rows, `[num_tokens, row_dim]`, on the host."""
        ranges = row_ranges(runs, self.page_tokens, num_tokens)
        return torch.cat([self.rows[start : start + length] for start, length in ranges])

    def close(self) -> None:
        """Unlocks the memory. No copy or store call may use it any more."""
        if self.is_pinned:
            self.is_pinned = False
            self._unlock()


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _lock_pages(memory: torch.Tensor) -> None:
    """Page-locks in place: torch's own pinned allocator would round the size up to a power of two."""
    status = int(_cuda_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status:
        raise MemoryError(
            f"cannot page-lock {memory.nbytes} bytes for the embedding cache (CUDA error {status}): "
            "make the pool smaller or raise the limit on locked memory"
        )


def _unlock_pages(memory: torch.Tensor) -> None:
    _cuda_runtime().cudaHostUnregister(memory.data_ptr())
