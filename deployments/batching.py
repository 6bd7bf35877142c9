"""One owner for a stage's queue: batches by token budget, in arrival order, whenever the device is free."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from epd.deployments.errors import Overloaded
from epd.deployments.timing import Timings

Work = TypeVar("Work")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class _Queued(Generic[Work, Result]):
    work: Work
    num_tokens: int
    answer: asyncio.Future[Result]
    batch: asyncio.Future[None] | None = None
    """Ends with the batch that the item is part of; None while it waits."""
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    ended_at: float = 0.0


class TokenBatcher(Generic[Work, Prepared, Result]):
    """Runs work in batches on one thread, as soon as that thread is free.

    A batch takes what waits when the device is free: it never waits to be filled. When what waits fills a
    batch already, that batch is prepared while the one before it runs.

    prepare: makes ready what a batch needs, on a thread of its own. run: called on the device's thread with
    what `prepare` made; returns one result per work item, in order; a result may be an exception, which fails
    that item alone. An exception raised by either makes each of the batch's items be tried once more
    alone, so that a bad one cannot fail its neighbours.
    max_tokens: budget of one batch. An item larger than it runs alone. max_items: most items of a batch.
    max_queued_tokens: beyond it `submit` raises Overloaded at once.
    A cancelled item leaves the queue. One that was taken already is awaited before its `submit` ends, so that
    what it reads may be given up once `submit` has ended, however that went.
    step: name of the run in `timings`. observe_batch: called with the number of items and of tokens.
    """

    def __init__(
        self,
        prepare: Callable[[Sequence[Work]], Prepared],
        run: Callable[[Prepared], Sequence[Result | Exception]],
        *,
        max_tokens: int,
        max_items: int,
        max_queued_tokens: int,
        step: str,
        timings: Timings | None = None,
        observe_batch: Callable[[int, int], None] = lambda num_items, num_tokens: None,
    ) -> None:
        self._prepare = prepare
        self._run = run
        self._max_tokens = max_tokens
        self._max_items = max_items
        self._max_queued_tokens = max_queued_tokens
        self._step = step
        self._timings = timings or Timings()
        self._observe_batch = observe_batch
        self._queue: deque[_Queued[Work, Result]] = deque()
        self._queued_tokens = 0
        self._running_tokens = 0
        self._changed = asyncio.Event()
        self._device = asyncio.Semaphore(1)
        self._prepare_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{step}-prepare")
        self._device_thread = ThreadPoolExecutor(1, thread_name_prefix=step)
        self._feeder: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._closing = False
        self.num_batches = 0
        self.num_items = 0
        self.num_tokens = 0

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait; those of a batch that was taken do not count."""
        return self._queued_tokens

    @property
    def waiting_tokens(self) -> int:
        """Tokens that wait or run: what is left to do."""
        return self._queued_tokens + self._running_tokens

    async def submit(self, work: Work, num_tokens: int) -> Result:
        """Queues one item and returns its result. Raises what the item's run raised, or Overloaded."""
        assert not self._closing, "submitted after close"
        if self._queue and self._queued_tokens + num_tokens > self._max_queued_tokens:
            raise Overloaded(
                f"{self._queued_tokens} tokens wait already and the queue takes {self._max_queued_tokens}"
            )
        item: _Queued[Work, Result] = _Queued(work, num_tokens, asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self._queued_tokens += num_tokens
        self._changed.set()
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed())
        try:
            result = await item.answer
        except asyncio.CancelledError:
            while item.batch is not None and not item.batch.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(item.batch)
            raise
        self._timings.record("queue", item.started_at - item.submitted_at)
        self._timings.record(self._step, item.ended_at - item.started_at)
        return result

    async def close(self) -> None:
        """Runs what waits, then ends the threads."""
        self._closing = True
        self._changed.set()
        if self._feeder is not None:
            await self._feeder
        await asyncio.gather(*self._running)
        self._prepare_thread.shutdown()
        self._device_thread.shutdown()

    async def _feed(self) -> None:
        """Takes batches and hands them to the device, one prepared ahead at most."""
        loop = asyncio.get_running_loop()
        while await self._work_is_due():
            if not (batch := self._take()):
                continue
            works = [item.work for item in batch]
            prepared = await loop.run_in_executor(self._prepare_thread, self._attempt, works)
            await self._device.acquire()
            task = asyncio.create_task(self._run_batch(batch, prepared))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _work_is_due(self) -> bool:
        """Waits until a batch should be taken; False when there will be none any more."""
        while not self._queue or (self._device.locked() and not self._fills_a_batch()):
            if self._closing and not self._queue:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    def _fills_a_batch(self) -> bool:
        return self._queued_tokens >= self._max_tokens or len(self._queue) >= self._max_items

    def _take(self) -> list[_Queued[Work, Result]]:
        """The next batch: from the head of the queue, without reordering, up to the budget."""
        batch: list[_Queued[Work, Result]] = []
        tokens = 0
        ended = asyncio.get_running_loop().create_future()
        while self._queue and len(batch) < self._max_items:
            head = self._queue[0]
            if not head.answer.done():
                if batch and tokens + head.num_tokens > self._max_tokens:
                    break
                head.batch = ended
                batch.append(head)
                tokens += head.num_tokens
            self._queue.popleft()
            self._queued_tokens -= head.num_tokens
        self._running_tokens += tokens
        return batch

    async def _run_batch(self, batch: list[_Queued[Work, Result]], prepared: Prepared | Exception) -> None:
        """On the device's thread; the device is ours until it ends."""
        loop = asyncio.get_running_loop()
        tokens = sum(item.num_tokens for item in batch)
        works = [item.work for item in batch]
        started = time.perf_counter()
        results = await loop.run_in_executor(self._device_thread, self._run_isolated, works, prepared)
        ended = time.perf_counter()
        self._device.release()
        self._running_tokens -= tokens
        self._changed.set()
        self.num_batches += 1
        self.num_items += len(batch)
        self.num_tokens += tokens
        self._observe_batch(len(batch), tokens)
        assert batch[0].batch is not None
        batch[0].batch.set_result(None)
        for item, result in zip(batch, results, strict=True):
            item.started_at, item.ended_at = started, ended
            if item.answer.done():
                continue
            if isinstance(result, Exception):
                item.answer.set_exception(result)
            else:
                item.answer.set_result(result)

    def _attempt(self, works: Sequence[Work]) -> Prepared | Exception:
        try:
            return self._prepare(works)
        except Exception as error:  # noqa: BLE001  the boundary between an item's failure and the stage
            return error

    def _run_isolated(
        self, works: Sequence[Work], prepared: Prepared | Exception
    ) -> Sequence[Result | Exception]:
        if not isinstance(prepared, Exception):
            try:
                results = self._run(prepared)
                assert len(results) == len(works), (len(results), len(works))
                return results
            except Exception as error:  # noqa: BLE001  as above
                prepared = error
        if len(works) == 1:
            return [prepared]
        return [result for work in works for result in self._run_isolated([work], self._attempt([work]))]
