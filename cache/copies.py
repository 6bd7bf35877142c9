"""Copies between the pool and whoever makes or uses rows, and pages kept for as long as a copy runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from epd.cache.entries import Entry, EntryTable
from epd.cache.filling import FillBoard
from epd.cache.handles import Handle
from epd.cache.plans import device_to_host_plan, host_to_device_plan
from epd.cache.workers import Job, JobRunner
from epd.kernels.transfer import AsyncCopy, transfer_ranges


class PoolCopies:
    """Fills FILLING entries, loads and unpins READY ones. All but `load` belong to the cache's event loop."""

    def __init__(
        self, table: EntryTable, board: FillBoard, runner: JobRunner, *, inline_copy_bytes: int
    ) -> None:
        """inline_copy_bytes: host rows up to this size are copied at once, larger ones by `runner`."""
        self._table = table
        self._pool = table.pool
        self._board = board
        self._runner = runner
        self._inline_copy_bytes = inline_copy_bytes
        self._stream: torch.cuda.Stream | None = None
        self._jobs: set[Job[Any]] = set()
        self._leaving: set[Handle] = set()

    async def fill(self, entry: Entry, rows: torch.Tensor) -> None:
        """Copies `rows` to the entry's pages; then it is READY. On failure or cancellation it is given up."""
        plan = device_to_host_plan(entry.runs, self._pool.page_tokens, entry.wanted.num_tokens)
        places = (plan.src_starts, plan.dst_starts, plan.lengths)
        copy = partial(transfer_ranges, rows, self._pool.rows, *places, self._side_stream(rows))
        job: Job[Any] | None = None
        try:
            if rows.is_cuda or rows.nbytes <= self._inline_copy_bytes:
                started = copy()
                job = None if started.done() else self._submit(started.wait)
            else:
                job = self._submit(copy)
            if job is not None:
                await asyncio.shield(job.future)
        except BaseException:
            self._give_up(entry, job)
            raise
        self._board.ready(entry)

    def load(self, handles: Sequence[Handle], dst: torch.Tensor, dst_starts: Sequence[int]) -> AsyncCopy:
        """See `EmbeddingCache.load`."""
        places = ((h.runs, h.num_tokens, start) for h, start in zip(handles, dst_starts, strict=True))
        plan = host_to_device_plan(places, self._pool.page_tokens)
        if plan.is_empty:
            return AsyncCopy("copy_")
        copy = transfer_ranges(self._pool.rows, dst, plan.src_starts, plan.dst_starts, plan.lengths)
        if not copy.done():
            for handle in handles:
                handle.copies.append(copy)
        return copy

    def unpin(self, handle: Handle) -> None:
        """Ends a pin; where a load still reads the rows, once it has. Raises ValueError the second time."""
        if handle in self._leaving:
            raise ValueError(f"the handle of {handle.key} was released before")
        running = [copy for copy in handle.copies if not copy.done()]
        if not running:
            self._table.unpin(handle)
            return
        self._leaving.add(handle)
        job = self._submit(partial(_wait_all, running))
        job.future.add_done_callback(partial(self._end_pin, handle))

    async def close(self, timeout_s: float) -> None:
        """Waits, at most so long, for copies that run."""
        if self._jobs:
            await asyncio.wait([job.future for job in self._jobs], timeout=timeout_s)
        self._runner.close()

    def _side_stream(self, rows: torch.Tensor) -> torch.cuda.Stream | None:
        """A stream beside the device's compute, behind what made `rows`: the legacy default stream has no
        batched copy.
        """
        if not rows.is_cuda:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        return self._stream

    def _submit(self, call: Callable[[], Any]) -> Job[Any]:
        job = self._runner.submit(call)
        assert job is not None, "copies are never refused"
        self._jobs.add(job)
        job.future.add_done_callback(lambda _: self._jobs.discard(job))
        return job

    def _give_up(self, entry: Entry, job: Job[Any] | None) -> None:
        """The entry's pages drain for as long as the copy still writes them."""
        if job is None or job.future.done() or self._runner.give_up(job):
            self._board.fail(entry)
        else:
            self._board.fail(entry, draining=True)
            job.future.add_done_callback(lambda _: self._table.drained(entry))

    def _end_pin(self, handle: Handle, ended: asyncio.Future[Any]) -> None:
        ended.exception()
        self._leaving.remove(handle)
        self._table.unpin(handle)


def _wait_all(copies: Sequence[AsyncCopy]) -> None:
    for copy in copies:
        copy.wait()
