"""The pool: one piece of memory for rows and headers."""

from __future__ import annotations

import pytest
import torch

from epd.cache.pool import PagePool
from epd.cache.rows import rows_from_numpy, rows_to_numpy
from epd.cache.types import PageRun, RowLayout


def test_rows_and_headers_lie_in_the_registered_memory_and_apart() -> None:
    """Every buffer is inside `memory`, and no two overlap."""
    pool = PagePool(RowLayout(3, torch.float16), 4, 5, pin=False)
    buffers = [pool.header_buffer((PageRun(page, 1),)) for page in range(5)]
    buffers += pool.row_buffers((PageRun(0, 5),), 20)
    first, last = pool.memory.data_ptr(), pool.memory.data_ptr() + pool.memory.nbytes
    end = first
    for pointer, size in sorted(buffers):
        assert end <= pointer
        end = pointer + size
    assert end <= last
    assert first % 4096 == 0
    assert pool.rows.shape == (20, 3)


def test_a_header_is_read_back_from_its_first_page() -> None:
    """The slot belongs to the entry's first page."""
    pool = PagePool(RowLayout(4, torch.float32), 2, 4, pin=False)
    pool.write_header((PageRun(3, 1), PageRun(0, 1)), b"x" * 512)
    assert pool.read_header((PageRun(3, 1),)) == b"x" * 512
    assert pool.read_header((PageRun(0, 1),)) == bytes(512)


@pytest.mark.parametrize(("page_tokens", "num_pages"), [(0, 1), (1, 0), (-1, 4)])
def test_a_pool_without_pages_is_refused(page_tokens: int, num_pages: int) -> None:
    """Both sizes are named."""
    with pytest.raises(ValueError, match=f"{num_pages} pages of {page_tokens} tokens"):
        PagePool(RowLayout(4, torch.float32), page_tokens, num_pages, pin=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_survive_the_way_through_numpy(dtype: torch.dtype) -> None:
    """Bit for bit, also in bfloat16, and also from an array that cannot be written."""
    rows = torch.randn(3, 4).to(dtype)
    array = rows_to_numpy(rows)
    array.flags.writeable = False
    assert torch.equal(rows_from_numpy(array, RowLayout(4, dtype)), rows)
    with pytest.raises(ValueError, match="were expected"):
        rows_from_numpy(array, RowLayout(5, dtype))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_with_a_device_the_memory_is_page_locked() -> None:
    """The rows are pinned, in a pool of no power of two, until it is closed."""
    pool = PagePool(RowLayout(33, torch.bfloat16), 3, 7)
    assert pool.is_pinned
    assert pool.rows.is_pinned()
    pool.close()
    assert not pool.rows.is_pinned()
