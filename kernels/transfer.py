"""Copies of many row ranges between two 2-D tensors, submitted at once.

Pinned host memory to CUDA and back takes the driver's batched copy (`epd.kernels.batch_copy`). Everything
else, and every machine where that is not to be had, takes `Tensor.copy_` per range, with the same result.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, Protocol

import torch

from epd.kernels.async_copy import AsyncCopy, TransferPath
from epd.kernels.batch_copy import BatchCopyStatus, Driver, default_driver, status_of_build
from epd.kernels.transfer_plan import RowNumbers, TransferPlan

__all__ = ["AsyncCopy", "BatchCopyStatus", "TransferPlan", "batch_copy_status", "run_plan", "transfer_ranges"]


def batch_copy_status(device: int = 0) -> BatchCopyStatus:
    """How copies between pinned host memory and CUDA device `device` go, and why not in one batch.

    Opens the driver library at the first call; on a ROCm build of torch, never.
    """
    return status_of_build(torch.version.hip, device)


def transfer_ranges(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_starts: RowNumbers,
    dst_starts: RowNumbers,
    lengths: RowNumbers,
    stream: torch.cuda.Stream | None = None,
) -> AsyncCopy:
    """Copies `src[s : s + n]` to `dst[d : d + n]` for each `(s, d, n)`.

    `src` `[src_rows, width]` and `dst` `[dst_rows, width]` have one dtype and share no memory. Where a CUDA
    device takes part the copies run on `stream` (default: its current one), after the work already
    submitted there; the caller makes `stream` wait for what other streams write. On CUDA's legacy default
    stream, torch's default, the driver has no batches: give a stream of its own. CPU to CPU has ended on
    return.

    Raises ValueError, naming the range, before anything is submitted: lists of unequal length, negative
    or out-of-bounds ranges, overlapping destinations, another dtype or row width. Raises RuntimeError,
    naming the driver's error, after waiting for what was submitted.
    """
    return run_plan(TransferPlan(src_starts, dst_starts, lengths), src, dst, stream)


def run_plan(
    plan: TransferPlan,
    src: torch.Tensor,
    dst: torch.Tensor,
    stream: torch.cuda.Stream | None = None,
    *,
    force: Literal["ranges", "copy_"] | None = None,
) -> AsyncCopy:
    """`transfer_ranges` with a plan made before.

    `force` names a slower path to take instead of the best: to compare with, or to rule one out.
    """
    check_tables(plan, src, dst)
    device = dst.device if dst.is_cuda else src.device
    if device.type != "cuda":
        copy_each(plan, src, dst)
        return AsyncCopy("copy_")
    if stream is None:
        stream = torch.cuda.current_stream(device)
    elif stream.device != device:
        raise ValueError(f"stream of {stream.device} for a tensor on {device}")
    driver = native_driver(src, dst) if force != "copy_" else None
    handle, batch = stream.cuda_stream, force is None
    with torch.cuda.stream(stream):
        try:
            path = submit(plan, src, dst, driver, handle, device.index, batch=batch)
        except RuntimeError:
            with suppress(RuntimeError):  # the first error is the one to tell
                stream.synchronize()
            raise
        for tensor in (src, dst):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
    return AsyncCopy(path, event, src, dst)


def submit(
    plan: TransferPlan,
    src: torch.Tensor,
    dst: torch.Tensor,
    driver: Driver | None,
    stream: int,
    device: int,
    *,
    batch: bool = True,
    any_order: bool = False,
) -> TransferPath:
    """Submits all ranges through `driver`, or with `copy_` when there is none. See `TransferPlan.submit`."""
    if driver is None or driver.path == "none":
        copy_each(plan, src, dst)
        return "copy_"
    row_bytes = src.shape[1] * src.element_size()
    path = plan.submit(
        driver, src.data_ptr(), dst.data_ptr(), row_bytes, stream, device, batch=batch, any_order=any_order
    )
    assert path != "none", "a driver that cannot copy was asked to"
    return path


class Table(Protocol):
    """What decides whether a tensor's rows can be copied as plain bytes."""

    @property
    def device(self) -> torch.device: ...

    def is_pinned(self) -> bool: ...

    def is_contiguous(self) -> bool: ...

    def is_conj(self) -> bool: ...

    def is_neg(self) -> bool: ...


def native_refusal(src: Table, dst: Table, hip: str | None) -> str | None:
    """Why the driver cannot copy between them, or None. `hip` is torch's ROCm version on such builds."""
    if hip is not None:
        return "ROCm"
    if {src.device.type, dst.device.type} != {"cpu", "cuda"}:
        return "not between host and device"
    if not (src.is_contiguous() and dst.is_contiguous()):
        return "strided"
    if any(t.is_conj() or t.is_neg() for t in (src, dst)):
        return "lazily conjugated or negated"
    host = src if src.device.type == "cpu" else dst
    return None if host.is_pinned() else "not pinned"


def native_driver(src: torch.Tensor, dst: torch.Tensor) -> Driver | None:
    """The driver to copy between them with, or None when `copy_` has to do it."""
    return default_driver() if native_refusal(src, dst, torch.version.hip) is None else None


def check_tables(plan: TransferPlan, src: torch.Tensor, dst: torch.Tensor) -> None:
    """Raises ValueError unless `plan` can copy rows of `src` to rows of `dst`."""
    if src.dim() != 2 or dst.dim() != 2:
        raise ValueError(f"src and dst must be 2-D, got shapes {tuple(src.shape)} and {tuple(dst.shape)}")
    if src.dtype != dst.dtype:
        raise ValueError(f"src and dst must have one dtype, got {src.dtype} and {dst.dtype}")
    if src.shape[1] != dst.shape[1]:
        raise ValueError(f"src and dst must have one row width, got {src.shape[1]} and {dst.shape[1]}")
    plan.check_bounds(src.shape[0], dst.shape[0])


def copy_each(plan: TransferPlan, src: torch.Tensor, dst: torch.Tensor) -> None:
    """One `copy_` per range, on the current stream. Returns early only where host memory is pinned."""
    if not plan.num_ranges:
        return
    non_blocking = native_refusal(src, dst, None) is None
    with torch.inference_mode():
        src, dst = src.detach(), dst.detach()
        for src_start, dst_start, length in plan:
            dst[dst_start : dst_start + length].copy_(
                src[src_start : src_start + length], non_blocking=non_blocking
            )
