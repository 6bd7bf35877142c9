"""transfer_ranges on CPU tensors, and the choice of a path, against plain slicing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epd.kernels.batch_copy import BatchCopyStatus, Driver, load_driver, status_of_build
from epd.kernels.transfer import (
    TransferPlan,
    batch_copy_status,
    native_refusal,
    run_plan,
    submit,
    transfer_ranges,
)
from tests.kernels.fake_driver import FakeDriver

STREAM = 0x7000
DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.float64)


@dataclass(frozen=True)
class Case:
    """Two tables and ranges between them that are all right."""

    src: torch.Tensor
    dst: torch.Tensor
    src_starts: list[int]
    dst_starts: list[int]
    lengths: list[int]

    @property
    def ranges(self) -> tuple[list[int], list[int], list[int]]:
        return self.src_starts, self.dst_starts, self.lengths

    @property
    def reversed_ranges(self) -> tuple[list[int], list[int], list[int]]:
        return self.dst_starts, self.src_starts, self.lengths


def reference(
    src: torch.Tensor, dst: torch.Tensor, ranges: tuple[list[int], list[int], list[int]]
) -> torch.Tensor:
    """What `dst` should hold afterwards, one range at a time."""
    expected = dst.clone()
    for s, d, n in zip(*ranges, strict=True):
        expected[d : d + n] = src[s : s + n]
    return expected


def fixed_case() -> Case:
    """bf16, 37 columns, 28 rows of host and 16 of device memory, destination filled with -1."""
    src = torch.arange(28 * 37, dtype=torch.float32).reshape(28, 37).to(torch.bfloat16)
    return Case(src, torch.full((16, 37), -1, dtype=torch.bfloat16), [1, 11, 23], [2, 6, 10], [4, 4, 2])


@st.composite
def fragmentations(draw: st.DrawFn) -> Case:
    """Random runs, neither side overlapping, shuffled, some empty, some neighbours."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=24))
    starts: list[list[int]] = []
    rows: list[int] = []
    for _ in range(2):
        order = draw(st.permutations(range(len(lengths))))
        at, side = 0, [0] * len(lengths)
        for i in order:
            at += draw(st.sampled_from((0, 0, 1, 3)))
            side[i] = at
            at += lengths[i]
        starts.append(side)
        rows.append(at + draw(st.integers(0, 2)))
    width, dtype = draw(st.integers(1, 9)), draw(st.sampled_from(DTYPES))
    src = torch.arange(rows[0] * width).reshape(rows[0], width).remainder(100).to(dtype)
    return Case(src, torch.full((rows[1], width), -1, dtype=dtype), starts[0], starts[1], lengths)


@settings(deadline=None)
@given(fragmentations())
def test_any_fragmentation_equals_range_by_range(case: Case) -> None:
    """Every fragmentation gives what plain slicing gives, out and back."""
    expected = reference(case.src, case.dst, case.ranges)
    assert transfer_ranges(case.src, case.dst, *case.ranges).done()
    assert torch.equal(case.dst, expected)
    back = torch.full_like(case.src, -1)
    transfer_ranges(case.dst, back, *case.reversed_ranges)
    assert torch.equal(back, reference(case.dst, torch.full_like(case.src, -1), case.reversed_ranges))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=fragmentations(), batch=st.booleans())
def test_any_fragmentation_through_the_driver(fake: FakeDriver, case: Case, batch: bool) -> None:
    """The native paths give the same, out and back; the fake driver copies in an order of its own."""
    driver = FakeDriver(fake.library, fake.extension).load()
    expected = reference(case.src, case.dst, case.ranges)
    submit(TransferPlan(*case.ranges), case.src, case.dst, driver, STREAM, 0, batch=batch)
    assert torch.equal(case.dst, expected)
    back = torch.full_like(case.src, -1)
    submit(TransferPlan(*case.reversed_ranges), case.dst, back, driver, STREAM, 0, batch=batch)
    assert torch.equal(back, reference(case.dst, torch.full_like(case.src, -1), case.reversed_ranges))


def test_fixed_case_leaves_other_rows_alone() -> None:
    """The published case: rows that no range names keep their -1."""
    case = fixed_case()
    expected = reference(case.src, case.dst, case.ranges)
    transfer_ranges(case.src, case.dst, *case.ranges)
    assert torch.equal(case.dst, expected)
    assert (case.dst[[0, 1, 12, 13, 14, 15]] == -1).all()


def test_fixed_case_backwards() -> None:
    """The same ranges from the small table to the large one."""
    case = fixed_case()
    src, dst = torch.rand(16, 37).to(torch.bfloat16), torch.full_like(case.src, -1)
    transfer_ranges(src, dst, *case.reversed_ranges)
    assert torch.equal(dst, reference(src, torch.full_like(dst, -1), case.reversed_ranges))
    assert (dst[[0, *range(5, 11), *range(15, 23), *range(25, 28)]] == -1).all()


@pytest.mark.parametrize(
    ("path", "version", "stream"),
    [("batch", 13000, STREAM), ("ranges", 12040, STREAM), ("ranges", 13000, 0)],
    ids=["batch", "old driver", "legacy stream"],
)
def test_fixed_case_through_the_driver(fake: FakeDriver, path: str, version: int, stream: int) -> None:
    """Each native path moves the bytes of a 37-column bf16 row."""
    fake.knobs.version = version
    case = fixed_case()
    expected = reference(case.src, case.dst, case.ranges)
    taken = submit(TransferPlan(*case.ranges), case.src, case.dst, fake.load(), stream, 0)
    assert taken == path
    assert [size for _, _, size, _ in fake.copies] == [4 * 74, 4 * 74, 2 * 74]
    assert torch.equal(case.dst, expected)


def test_source_order_can_be_loosened(fake: FakeDriver) -> None:
    """Stream order unless asked otherwise."""
    case = fixed_case()
    orders = []
    for any_order in (False, True):
        submit(TransferPlan(*case.ranges), case.src, case.dst, fake.load(), STREAM, 0, any_order=any_order)
        orders.append(fake.last_batch.source_order)
    assert orders == [1, 3]


def test_without_a_driver_rows_go_by_copy() -> None:
    """Where the extension is not built, copy_ gives the same rows."""
    case = fixed_case()
    expected = reference(case.src, case.dst, case.ranges)
    nothing = load_driver(extension="epd.kernels._never_built")
    assert submit(TransferPlan(*case.ranges), case.src, case.dst, nothing, STREAM, 0) == "copy_"
    assert torch.equal(case.dst, expected)


def test_driver_error_reaches_the_caller(fake: FakeDriver) -> None:
    """The driver's error is raised by name."""
    fake.knobs.batch_result = 700
    case = fixed_case()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        submit(TransferPlan(*case.ranges), case.src, case.dst, fake.load(), STREAM, 0)


def test_one_plan_serves_many_tables() -> None:
    """A plan is used on tables other than its first, of another dtype and width."""
    plan = TransferPlan([0, 3], [4, 0], [2, 2])
    for width, dtype in ((3, torch.float32), (5, torch.int8)):
        src, dst = torch.ones(5, width, dtype=dtype), torch.zeros(6, width, dtype=dtype)
        run_plan(plan, src, dst)
        assert dst[:, 0].tolist() == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("strided", ["src", "dst"])
def test_strided_tensors(strided: str) -> None:
    """Column slices and transposed tables are copied by value like any other."""
    src, dst = torch.rand(6, 4), torch.zeros(8, 4)
    if strided == "src":
        src = torch.rand(4, 6).T
    else:
        dst = torch.zeros(8, 9)[:, ::2][:, :4]
    transfer_ranges(src, dst, [4, 0], [0, 6], [2, 2])
    assert torch.equal(dst[[0, 1, 6, 7]], src[[4, 5, 0, 1]])
    assert (dst[2:6] == 0).all()


def test_rows_without_columns() -> None:
    """Width 0 is a table like any other."""
    assert transfer_ranges(torch.empty(3, 0), torch.empty(3, 0), [0], [1], [2]).done()


def test_autograd_and_inference_tensors() -> None:
    """Rows move between parameters and inference tensors without a graph."""
    with torch.inference_mode():
        inferred = torch.ones(2, 3)
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    transfer_ranges(inferred, parameter, [0], [1], [2])
    assert parameter.sum() == 6
    assert parameter.grad_fn is None
    transfer_ranges(torch.nn.Parameter(torch.full((1, 3), 5.0)), inferred, [0], [1], [1])
    assert inferred[:, 0].tolist() == [1, 5]


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        (
            torch.zeros(4, 3),
            torch.zeros(4, 3, dtype=torch.int32),
            "one dtype, got torch.float32 and torch.int32",
        ),
        (torch.zeros(4, 3), torch.zeros(4, 2), "one row width, got 3 and 2"),
        (torch.zeros(4), torch.zeros(4, 1), r"2-D, got shapes \(4,\) and \(4, 1\)"),
        (torch.zeros(2, 3), torch.zeros(4, 3), r"range 1: source rows 2\.\.3 of 2"),
        (torch.zeros(4, 3), torch.zeros(3, 3), r"range 0: destination rows 2\.\.3 of 3"),
    ],
)
def test_tables_that_do_not_fit(src: torch.Tensor, dst: torch.Tensor, message: str) -> None:
    """ValueError before a single row is written."""
    with pytest.raises(ValueError, match=message):
        transfer_ranges(src + 1, dst, [0, 2], [2, 0], [2, 2])
    assert not dst.any()


@pytest.mark.parametrize(
    "ranges",
    [
        ([0, 1], [0], [1, 1]),
        ([0, -1], [0, 1], [1, 1]),
        ([0, 1], [0, 3], [1, 2]),
        ([0, 1], [0, 0], [1, 1]),
    ],
    ids=["lengths", "negative", "bounds", "overlap"],
)
def test_nothing_is_written_when_a_range_is_refused(ranges: tuple[list[int], list[int], list[int]]) -> None:
    """The ranges before the bad one are not copied either."""
    dst = torch.zeros(4, 2)
    with pytest.raises(ValueError):
        transfer_ranges(torch.ones(4, 2), dst, *ranges)
    assert not dst.any()


@dataclass(frozen=True)
class FakeTable:
    """What the choice of a path looks at."""

    device: torch.device
    pinned: bool = False
    contiguous: bool = True
    conjugated: bool = False
    negated: bool = False

    def is_pinned(self) -> bool:
        return self.pinned

    def is_contiguous(self) -> bool:
        return self.contiguous

    def is_conj(self) -> bool:
        return self.conjugated

    def is_neg(self) -> bool:
        return self.negated


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PINNED = FakeTable(CPU, pinned=True)


@pytest.mark.parametrize("pair", [(PINNED, FakeTable(CUDA)), (FakeTable(CUDA), PINNED)], ids=["H2D", "D2H"])
def test_pinned_host_and_cuda_go_native(pair: tuple[FakeTable, FakeTable]) -> None:
    """Both directions between pinned memory and a device take the driver; on ROCm neither does."""
    assert native_refusal(*pair, hip=None) is None
    assert native_refusal(*pair, hip="6.4") == "ROCm"


@pytest.mark.parametrize(
    ("src", "dst", "reason"),
    [
        (FakeTable(CPU), FakeTable(CUDA), "not pinned"),
        (FakeTable(CUDA), FakeTable(CPU), "not pinned"),
        (PINNED, FakeTable(CPU), "not between host and device"),
        (FakeTable(CUDA), FakeTable(CUDA), "not between host and device"),
        (PINNED, FakeTable(torch.device("meta")), "not between host and device"),
        (FakeTable(CPU, pinned=True, contiguous=False), FakeTable(CUDA), "strided"),
        (PINNED, FakeTable(CUDA, contiguous=False), "strided"),
        (PINNED, FakeTable(CUDA, negated=True), "lazily conjugated or negated"),
        (FakeTable(CPU, pinned=True, conjugated=True), FakeTable(CUDA), "lazily conjugated or negated"),
    ],
)
def test_everything_else_is_left_to_copy(src: FakeTable, dst: FakeTable, reason: str) -> None:
    """What is not plain pinned bytes is not given to the driver, for a reason."""
    assert native_refusal(src, dst, hip=None) == reason


def test_status_of_this_process() -> None:
    """The status says which path, and why when it is not the batch."""
    status = batch_copy_status()
    assert status.path in ("batch", "ranges", "copy_")
    assert (status.reason is None) == (status.path == "batch")


def test_status_on_rocm_opens_no_driver() -> None:
    """A ROCm build has no libcuda to ask, whatever is installed beside it."""
    opened: list[str] = []

    def open_driver() -> Driver:
        opened.append("driver")
        return load_driver()

    status = status_of_build("6.4", 0, open_driver)
    assert status == BatchCopyStatus("copy_", "ROCm build of torch (6.4): no CUDA driver", 0)
    assert opened == []
