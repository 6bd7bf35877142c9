"""Plans: which memory and which rows an entry's page runs mean."""

from __future__ import annotations

import pytest
import torch

from epd.cache.plans import CopyPlan, device_to_host_plan, host_to_device_plan, storage_buffers
from epd.cache.pool import PagePool
from epd.cache.types import PageRun, RowLayout
from epd.kernels.transfer import transfer_ranges

RUNS = (PageRun(2, 1), PageRun(7, 2))


def test_host_to_device_plan_of_the_example() -> None:
    """5 tokens on pages of 2, runs (2, 1) and (7, 2), to row 3 on."""
    assert host_to_device_plan([(RUNS, 5, 3)], 2) == CopyPlan([4, 14], [3, 5], [2, 3])


def test_device_to_host_plan_of_the_example() -> None:
    """The same entry on its way to the pool."""
    assert device_to_host_plan(RUNS, 2, 5) == CopyPlan([0, 2], [4, 14], [2, 3])


def test_storage_buffers_of_the_example() -> None:
    """Exactly the entry's bytes: the last page is stored as far as it is filled."""
    assert storage_buffers(RUNS, 2, 5, 100, 1000) == [(1400, 200), (2400, 300)]


def test_entries_follow_each_other_in_one_plan() -> None:
    """Several entries, each with its own destination, are one plan."""
    plan = host_to_device_plan([(RUNS, 5, 10), ((PageRun(0, 1),), 1, 0)], 2)
    assert plan == CopyPlan([4, 14, 0], [10, 12, 0], [2, 3, 1])


def test_runs_past_the_tokens_give_no_range() -> None:
    """Pages that an entry does not reach are not copied."""
    assert device_to_host_plan(RUNS, 2, 2) == CopyPlan([0], [4], [2])
    assert storage_buffers(RUNS, 2, 1, 100, 0) == [(400, 100)]


@pytest.mark.parametrize("entries", [[], [((), 0, 3)], [(RUNS, 0, 3)]])
def test_an_empty_plan_has_no_ranges(entries: list[tuple[tuple[PageRun, ...], int, int]]) -> None:
    """No tokens, no range, whatever the runs."""
    assert host_to_device_plan(entries, 2).is_empty


def test_too_few_pages_are_refused() -> None:
    """An entry that its runs cannot hold is a mistake, not a short copy."""
    with pytest.raises(ValueError, match="hold 6 rows, the entry has 7"):
        device_to_host_plan(RUNS, 2, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_survive_the_way_in_and_out(dtype: torch.dtype) -> None:
    """Through the pool and out again, bit for bit, touching no other row."""
    pool = PagePool(RowLayout(8, dtype), 2, 10, pin=False)
    rows = torch.randn(5, 8).to(dtype)
    back = device_to_host_plan(RUNS, 2, 5)
    transfer_ranges(rows, pool.rows, back.src_starts, back.dst_starts, back.lengths).wait()
    out = torch.zeros(9, 8, dtype=dtype)
    plan = host_to_device_plan([(RUNS, 5, 3)], 2)
    transfer_ranges(pool.rows, out, plan.src_starts, plan.dst_starts, plan.lengths).wait()
    assert torch.equal(out[3:8], rows)
    assert not out[:3].any()
    assert not out[8:].any()
    assert not pool.rows[:4].any()
    assert not pool.rows[17:].any()
