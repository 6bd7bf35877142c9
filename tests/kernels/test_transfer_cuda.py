"""transfer_ranges between pinned host memory and a CUDA device."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import pytest
import torch

from epd.kernels.transfer import AsyncCopy, TransferPlan, batch_copy_status, run_plan, transfer_ranges

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

Force = Literal["ranges", "copy_"] | None
SRC_STARTS, DST_STARTS, LENGTHS = [1, 11, 23], [2, 6, 10], [4, 4, 2]


def table(rows: int, *, device: bool, filled: bool) -> torch.Tensor:
    """bf16 rows of 37 columns, in pinned or device memory, numbered or all -1."""
    values = (
        torch.arange(rows * 37).remainder(251).reshape(rows, 37) if filled else torch.full((rows, 37), -1)
    )
    rows_ = values.to(torch.bfloat16)
    return rows_.cuda() if device else rows_.pin_memory()


def new_stream() -> torch.cuda.Stream:
    """A stream of its own, after the work submitted so far."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def expected_rows(src: torch.Tensor, rows: int, src_starts: list[int], dst_starts: list[int]) -> torch.Tensor:
    expected = torch.full((rows, 37), -1, dtype=torch.bfloat16)
    for s, d, n in zip(src_starts, dst_starts, LENGTHS, strict=True):
        expected[d : d + n] = src[s : s + n].cpu()
    return expected


def expected_path(force: Force) -> str:
    """The best path that this machine has, unless a slower one is forced."""
    best = batch_copy_status().path
    return force if force is not None and best != "copy_" else best


@pytest.mark.parametrize("to_device", [True, False], ids=["H2D", "D2H"])
@pytest.mark.parametrize("force", [None, "ranges", "copy_"])
def test_fixed_case_on_a_stream(to_device: bool, force: Force) -> None:
    """On a stream of its own: rows arrive by the path asked for, the others keep their -1."""
    src, dst = table(28, device=not to_device, filled=True), table(16, device=to_device, filled=False)
    stream = new_stream()
    copy = run_plan(TransferPlan(SRC_STARTS, DST_STARTS, LENGTHS), src, dst, stream, force=force)
    copy.wait()
    assert copy.done()
    assert copy.path == expected_path(force)
    assert torch.equal(dst.cpu(), expected_rows(src, 16, SRC_STARTS, DST_STARTS))


@pytest.mark.parametrize("to_device", [True, False], ids=["H2D", "D2H"])
def test_fixed_case_backwards(to_device: bool) -> None:
    """The same ranges from the small table to the large one."""
    src, dst = table(16, device=not to_device, filled=True), table(28, device=to_device, filled=False)
    stream = new_stream()
    transfer_ranges(src, dst, DST_STARTS, SRC_STARTS, LENGTHS, stream).wait()
    assert torch.equal(dst.cpu(), expected_rows(src, 28, DST_STARTS, SRC_STARTS))


@pytest.mark.parametrize("to_device", [True, False], ids=["H2D", "D2H"])
def test_default_stream_takes_ranges(to_device: bool) -> None:
    """torch's default stream is the legacy one, which has no batches."""
    src, dst = table(28, device=not to_device, filled=True), table(16, device=to_device, filled=False)
    copy = transfer_ranges(src, dst, SRC_STARTS, DST_STARTS, LENGTHS)
    copy.wait()
    assert copy.path == expected_path("ranges")
    assert torch.equal(dst.cpu(), expected_rows(src, 16, SRC_STARTS, DST_STARTS))


@pytest.mark.parametrize("kind", ["unpinned", "strided"])
@pytest.mark.parametrize("to_device", [True, False], ids=["H2D", "D2H"])
def test_other_tensors_take_copy(kind: str, to_device: bool) -> None:
    """Unpinned and strided tensors give the same rows through copy_."""
    src, dst = table(28, device=not to_device, filled=True), table(16, device=to_device, filled=False)
    if kind == "unpinned":
        src, dst = (t if t.is_cuda else t.clone() for t in (src, dst))
    else:
        src = torch.stack([src, src], dim=2)[:, :, 0]
    stream = new_stream()
    copy = transfer_ranges(src, dst, SRC_STARTS, DST_STARTS, LENGTHS, stream)
    copy.wait()
    assert copy.path == "copy_"
    assert torch.equal(dst.cpu(), expected_rows(src, 16, SRC_STARTS, DST_STARTS))


def test_another_stream_waits_without_the_host() -> None:
    """wait_stream() orders later work of the current stream after the copies."""
    src, dst = table(28, device=False, filled=True), table(16, device=True, filled=False)
    stream = new_stream()
    copy = transfer_ranges(src, dst, SRC_STARTS, DST_STARTS, LENGTHS, stream)
    copy.wait_stream()
    doubled = dst * 2
    assert torch.equal(doubled.cpu(), expected_rows(src, 16, SRC_STARTS, DST_STARTS) * 2)


def test_copies_follow_earlier_work_of_the_stream() -> None:
    """Rows computed on the stream just before are what arrives on the host."""
    stream = new_stream()
    dst = table(16, device=False, filled=False)
    with torch.cuda.stream(stream):
        src = table(28, device=True, filled=True)
        for _ in range(50):
            src = src + 0
        copy = transfer_ranges(src, dst, SRC_STARTS, DST_STARTS, LENGTHS, stream)
    copy.wait()
    assert torch.equal(dst, expected_rows(src, 16, SRC_STARTS, DST_STARTS))


def test_thread_that_never_used_cuda() -> None:
    """The calling thread needs no CUDA context of its own making."""
    src, dst = table(28, device=False, filled=True), table(16, device=True, filled=False)
    stream = new_stream()

    def transfer() -> AsyncCopy:
        return transfer_ranges(src, dst, SRC_STARTS, DST_STARTS, LENGTHS, stream)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(transfer).result().wait()
    assert torch.equal(dst.cpu(), expected_rows(src, 16, SRC_STARTS, DST_STARTS))


def test_source_may_be_dropped_at_once() -> None:
    """The host rows stay while in flight, although neither they nor the handle are held."""
    rows, width = 4096, 4096
    dst = torch.zeros(rows, width, device="cuda")
    stream = new_stream()
    order = random.Random(0).sample(range(rows), rows)
    src = torch.arange(rows, dtype=torch.float32).repeat_interleave(width).reshape(rows, width).pin_memory()
    transfer_ranges(src, dst, order, list(range(rows)), [1] * rows, stream)
    del src
    other = torch.full((rows, width), -1.0).pin_memory()
    stream.synchronize()
    assert dst[:, -1].cpu().tolist() == order
    assert other[0, 0] == -1


@pytest.mark.parametrize("to_device", [True, False], ids=["H2D", "D2H"])
def test_many_fragments(to_device: bool) -> None:
    """Thousands of shuffled rows arrive where they should, there and back."""
    rows = 5000
    order = random.Random(1).sample(range(rows), rows)
    src, dst = table(rows, device=not to_device, filled=True), table(rows, device=to_device, filled=False)
    stream = new_stream()
    transfer_ranges(src, dst, order, list(range(rows)), [1] * rows, stream).wait()
    assert torch.equal(dst.cpu(), src.cpu()[order])


def test_refusals_come_before_anything_is_submitted() -> None:
    """A bad range leaves the destination as it was."""
    src, dst = table(28, device=False, filled=True), table(16, device=True, filled=False)
    with pytest.raises(ValueError, match="range 1: destination rows"):
        transfer_ranges(src, dst, [0, 4], [0, 14], [4, 4], new_stream())
    assert (dst == -1).all()


def test_status_names_the_batch_or_a_reason() -> None:
    """Where a device is, the status is about its driver."""
    status = batch_copy_status(torch.cuda.current_device())
    assert (status.path == "batch") == (status.reason is None)
