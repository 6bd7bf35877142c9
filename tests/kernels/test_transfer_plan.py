"""Planning alone: what is refused, what is dropped, what is merged."""

from __future__ import annotations

import numpy as np
import pytest

from epd.kernels.transfer_plan import TransferPlan

FAR = 1 << 62


def test_neighbours_on_both_sides_are_merged() -> None:
    """Ranges that follow each other in source and destination become one."""
    plan = TransferPlan([0, 2, 5], [10, 12, 15], [2, 3, 1])
    assert list(plan) == [(0, 10, 6)]


def test_neighbours_are_merged_in_any_order() -> None:
    """The order given does not matter, and several groups are found."""
    plan = TransferPlan([5, 0, 40, 2, 41], [15, 10, 2, 12, 3], [1, 2, 1, 3, 4])
    assert list(plan) == [(40, 2, 5), (0, 10, 6)]
    assert (plan.num_ranges, plan.num_rows) == (2, 11)


@pytest.mark.parametrize(
    ("src", "dst"),
    [([0, 2], [10, 13]), ([0, 3], [10, 12]), ([2, 0], [10, 12])],
    ids=["destination gap", "source gap", "source order"],
)
def test_neighbours_on_one_side_stay_apart(src: list[int], dst: list[int]) -> None:
    """One side alone is not enough."""
    assert list(TransferPlan(src, dst, [2, 2])) == list(zip(src, dst, [2, 2], strict=True))


def test_empty_ranges_are_dropped() -> None:
    """An empty range between neighbours does not keep them apart, nor does it overlap."""
    plan = TransferPlan([0, 7, 2, 3], [4, 5, 6, 4], [2, 0, 2, 0])
    assert list(plan) == [(0, 4, 4)]


def test_plan_of_nothing() -> None:
    """No ranges, and ranges that are all empty, are plans of nothing."""
    for plan in (TransferPlan([], [], []), TransferPlan([3], [4], [0])):
        plan.check_bounds(3, 4)
        assert list(plan) == []
        assert (plan.num_ranges, plan.num_rows) == (0, 0)


def test_one_source_range_may_go_to_several_places() -> None:
    """Sources may overlap; destinations may not."""
    assert TransferPlan([0, 0], [0, 5], [3, 3]).num_ranges == 2


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda n: np.array(n, dtype=np.uint64)])
def test_numbers_come_as_any_integers(kind: type[list[int]]) -> None:
    """Lists, tuples and integer arrays of any width are taken."""
    assert list(TransferPlan(kind([1, 9]), kind([5, 0]), kind([2, 2]))) == [(9, 0, 2), (1, 5, 2)]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (([0], [0, 1], [1]), "must be equally long, got 1, 2 and 1"),
        (([0, 1], [0, 1], [1]), "must be equally long, got 2, 2 and 1"),
        (([0, -1], [0, 5], [1, 1]), "range 1: src_starts -1 is negative"),
        (([0, 1], [-2, 5], [1, 1]), "range 0: dst_starts -2 is negative"),
        (([0, 1], [0, 5], [1, -3]), "range 1: lengths -3 is negative"),
        (([0, FAR], [0, 5], [1, 1]), f"range 1: src_starts {FAR} is out of bounds"),
        (([0, 1], [0, 5], [1, 1 << 63]), f"range 1: lengths {1 << 63} is out of bounds"),
        (([0, 1], [0, -(1 << 80)], [1, 1]), f"range 1: dst_starts {-(1 << 80)} is negative"),
        (([0, 1.5], [0, 5], [1, 1]), "range 1: src_starts holds 1.5, not an integer"),
        (([0, 1], [0, 5], [1, "1"]), "range 1: lengths holds '1', not an integer"),
        (([[0]], [[0]], [[1]]), r"range 0: dst_starts holds \[0\], not an integer"),
        (([0, [1]], [0, 5], [1, 1]), r"range 1: src_starts holds \[1\], not an integer"),
        (
            ([0, 9, 4], [5, 0, 6], [2, 1, 2]),
            r"range 2: destination overlaps .* range 0 \(rows 6..7 and 5..6\)",
        ),
        (([0, 0], [3, 3], [1, 1]), r"range 1: destination overlaps .* range 0 \(rows 3..3 and 3..3\)"),
        (
            ([0, 0, 1], [3, 9, 2], [0, 1, 9]),
            r"range 2: destination overlaps .* range 1 \(rows 2..10 and 9..9\)",
        ),
    ],
)
def test_refusals_name_the_range(lists: tuple[list[int], list[int], list[int]], message: str) -> None:
    """ValueError says which range, by its place in the caller's lists."""
    with pytest.raises(ValueError, match=message):
        TransferPlan(*lists)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((7, 20), r"range 1: source rows 6\.\.7 of 7"),
        ((20, 12), r"range 0: destination rows 10\.\.12 of 12"),
        ((0, 0), r"range 0: source rows 0\.\.2 of 0"),
    ],
)
def test_bounds_name_the_range(rows: tuple[int, int], message: str) -> None:
    """A range that leaves either table is named."""
    plan = TransferPlan([0, 6], [10, 4], [3, 2])
    plan.check_bounds(8, 13)
    with pytest.raises(ValueError, match=message):
        plan.check_bounds(*rows)


def test_empty_range_beyond_the_end_is_out_of_bounds() -> None:
    """An empty range may start at the end of a table, not after it."""
    plan = TransferPlan([4], [0], [0])
    plan.check_bounds(4, 0)
    with pytest.raises(ValueError, match="range 0: source"):
        plan.check_bounds(3, 0)
