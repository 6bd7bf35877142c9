"""What a cache asks of its store: on threads, within a deadline, and never at a request's expense."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from epd.cache.entries import Entry, EntryTable
from epd.cache.filling import FillBoard
from epd.cache.handles import Handle
from epd.cache.stats import CacheCounters
from epd.cache.stores.base import GetResult, PutResult, Store
from epd.cache.transport import Fetched, Place, fetch, put
from epd.cache.workers import Job, MakeRunner

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StoreIO:
    """Fetches FILLING entries and publishes READY ones.

    While a call runs, its pages are kept: those of a fetch that was given up drain, those of a put stay
    pinned, until the call has ended, however long that takes.
    """

    def __init__(
        self,
        store: Store,
        table: EntryTable,
        board: FillBoard,
        counters: CacheCounters,
        *,
        timeout_s: float,
        get_threads: int,
        put_threads: int,
        max_queued_gets: int,
        max_queued_puts: int,
        inline_copy_bytes: int,
        make_runner: MakeRunner,
    ) -> None:
        self._store = store
        self._near = store.near()
        self._inline_copy_bytes = inline_copy_bytes
        self._table = table
        self._pool = table.pool
        self._board = board
        self._counters = counters
        self._timeout_s = timeout_s
        self._gets = make_runner("store-get", num_threads=get_threads, max_queued=max_queued_gets)
        self._puts = make_runner("store-put", num_threads=put_threads, max_queued=max_queued_puts)
        self._verdicts: dict[Entry, asyncio.Future[set[Entry]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_puts(self) -> int:
        """Entries that a put holds."""
        return len(self._verdicts)

    @property
    def num_hung(self) -> int:
        """Calls that were given up and still run."""
        return self._gets.num_hung + self._puts.num_hung

    def start_fetch(self, entries: Sequence[Entry]) -> None:
        """Has entries, FILLING and without a ticket, filled from the store, or given up."""
        self._counters.get_keys += len(entries)
        if not (entries := self._fetch_near(entries)):
            return
        job = self._gets.submit(partial(fetch, self._store, self._pool, _places(entries)))
        if job is None:
            self._counters.get_skipped += len(entries)
            for entry in entries:
                self._board.fail(entry)
        else:
            self._spawn(self._finish_fetch(entries, job))

    def _fetch_near(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Fills small entries from memory of this host, now: a thread would cost more. Returns the others."""
        num_bytes = sum(entry.wanted.num_tokens for entry in entries) * self._pool.layout.row_bytes
        if self._near is None or num_bytes > self._inline_copy_bytes:
            return entries
        try:
            results = fetch(self._near, self._pool, _places(entries))
        except Exception:
            logger.exception("a read of this host's memory raised")
            return entries
        left = []
        for entry, fetched in zip(entries, results, strict=True):
            self._count_fetch(entry, fetched)
            if fetched.is_hit:
                self._board.ready(entry)
            else:
                left.append(entry)
        return left

    async def _finish_fetch(self, entries: Sequence[Entry], job: Job[list[Fetched]]) -> None:
        if not await _ended(job, self._timeout_s):
            self._counters.get_timeouts += len(entries)
            is_running = not self._gets.give_up(job)
            for entry in entries:
                self._board.fail(entry, draining=is_running)
            if is_running:
                await _ended(job, None)
                for entry in entries:
                    self._table.drained(entry)
            return
        results = _result(job, [Fetched(GetResult.FAILED)] * len(entries))
        for entry, fetched in zip(entries, results, strict=True):
            self._count_fetch(entry, fetched)
            if fetched.is_hit:
                self._board.ready(entry)
            else:
                self._board.fail(entry)

    async def publish(self, entries: Sequence[Entry]) -> set[Entry]:
        """Those of `entries`, READY, that the store has by the deadline. Never raises."""
        fresh = [entry for entry in dict.fromkeys(entries) if entry not in self._verdicts]
        if fresh:
            self._start_put(fresh)
        verdicts = {self._verdicts[entry] for entry in entries if entry in self._verdicts}
        if verdicts:
            await asyncio.wait(verdicts)
        return set().union(*(verdict.result() for verdict in verdicts)).intersection(entries)

    async def close(self, timeout_s: float) -> bool:
        """Waits for what runs, at most so long; True when every call has ended."""
        self._gets.close()
        self._puts.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        return not self._tasks

    def _start_put(self, entries: Sequence[Entry]) -> None:
        self._counters.put_keys += len(entries)
        job = self._puts.submit(partial(put, self._store, self._pool, _places(entries)))
        if job is None:
            self._counters.put_dropped += len(entries)
            return
        verdict: asyncio.Future[set[Entry]] = asyncio.get_running_loop().create_future()
        self._verdicts.update(dict.fromkeys(entries, verdict))
        pins = [self._table.pin(entry) for entry in entries]
        self._spawn(self._finish_put(entries, pins, job, verdict))

    async def _finish_put(
        self,
        entries: Sequence[Entry],
        pins: Sequence[Handle],
        job: Job[list[PutResult]],
        verdict: asyncio.Future[set[Entry]],
    ) -> None:
        if await _ended(job, self._timeout_s):
            results = _result(job, [PutResult.FAILED] * len(entries))
            stored = {
                entry for entry, result in zip(entries, results, strict=True) if result is PutResult.STORED
            }
            self._count_put(results, stored)
            verdict.set_result(stored)
        else:
            self._counters.put_timeouts += len(entries)
            verdict.set_result(set())
            if not self._puts.give_up(job):
                await _ended(job, None)
        for entry, pin in zip(entries, pins, strict=True):
            del self._verdicts[entry]
            self._table.unpin(pin)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, whoever else is cancelled."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        """Has a mistake of ours, which nobody awaits, told at once by the loop's exception handler."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    def _count_fetch(self, entry: Entry, fetched: Fetched) -> None:
        counters = self._counters
        counters.integrity_failures += fetched.problem is not None
        counters.get_failures += fetched.result is GetResult.FAILED
        counters.get_skipped += fetched.result is GetResult.SKIPPED
        if fetched.is_hit:
            counters.hits_host += fetched.result is GetResult.HOST
            counters.hits_store += fetched.result is GetResult.STORE
            counters.get_bytes += entry.wanted.num_tokens * self._pool.layout.row_bytes

    def _count_put(self, results: Sequence[PutResult], stored: Iterable[Entry]) -> None:
        unstored = (PutResult.FAILED, PutResult.FULL, PutResult.BUSY)
        self._counters.put_failures += sum(result in unstored for result in results)
        self._counters.put_dropped += results.count(PutResult.SKIPPED)
        self._counters.put_bytes += sum(e.wanted.num_tokens for e in stored) * self._pool.layout.row_bytes


def _places(entries: Sequence[Entry]) -> list[Place]:
    return [Place(entry.wanted, entry.runs) for entry in entries]


async def _ended(job: Job[Any], timeout_s: float | None) -> bool:
    """Whether the job ended within the time."""
    done, _ = await asyncio.wait([job.future], timeout=timeout_s)
    return bool(done)


def _result(job: Job[T], otherwise: T) -> T:
    """What an ended job returned; `otherwise` when it raised."""
    error = job.future.exception()
    if error is None:
        return job.future.result()
    logger.error("a call of the store raised", exc_info=error)
    return otherwise
