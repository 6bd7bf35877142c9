"""One owner for a stage's queue: batches by token budget, in arrival order, whenever the device is free."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from epd.deployments.errors import Overloaded

Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(slots=True)
class _Queued(Generic[Work, Result]):
    work: Work
    num_tokens: int
    answer: asyncio.Future[Result]
    batch: asyncio.Future[None] | None = None
    """Ends with the batch that the item is part of; None while it waits."""


class TokenBatcher(Generic[Work, Result]):
    """Runs work in batches on one thread, as soon as that thread is free.

    run: called on the thread with a batch; returns one result per work item, in order; an item's result
    may be an exception, which fails that item alone. An exception raised by `run` itself fails its batch
    item by item: each is run once more alone, so that one bad item cannot fail its neighbours.
    max_tokens: budget of one batch. An item larger than it runs alone. max_items: most items of a batch.
    max_queued_tokens: beyond it `submit` raises Overloaded at once.
    A cancelled item leaves the queue. One that runs already is awaited before its `submit` ends, so that
    what it reads may be given up once `submit` has ended, however that went.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Work]], Sequence[Result | Exception]],
        *,
        max_tokens: int,
        max_items: int,
        max_queued_tokens: int,
        name: str,
    ) -> None:
        self._run = run
        self._max_tokens = max_tokens
        self._max_items = max_items
        self._max_queued_tokens = max_queued_tokens
        self._queue: deque[_Queued[Work, Result]] = deque()
        self._queued_tokens = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._pump: asyncio.Task[None] | None = None
        self.num_batches = 0
        self.num_items = 0
        self.num_tokens = 0

    @property
    def queued_tokens(self) -> int:
        """Tokens that wait; those of the running batch do not count."""
        return self._queued_tokens

    async def submit(self, work: Work, num_tokens: int) -> Result:
        """Queues one item and returns its result. Raises what the item's run raised, or Overloaded."""
        if self._queue and self._queued_tokens + num_tokens > self._max_queued_tokens:
            raise Overloaded(
                f"{self._queued_tokens} tokens wait already and the queue takes {self._max_queued_tokens}"
            )
        queued = _Queued(work, num_tokens, asyncio.get_running_loop().create_future())
        self._queue.append(queued)
        self._queued_tokens += num_tokens
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run_until_empty())
        try:
            return await queued.answer
        except asyncio.CancelledError:
            while queued.batch is not None and not queued.batch.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(queued.batch)
            raise

    async def close(self) -> None:
        """Waits for the queue to empty, then ends the thread."""
        if self._pump is not None:
            await self._pump
        self._thread.shutdown(wait=True)

    async def _run_until_empty(self) -> None:
        while batch := self._take():
            self.num_batches += 1
            self.num_items += len(batch)
            self.num_tokens += sum(queued.num_tokens for queued in batch)
            loop = asyncio.get_running_loop()
            ended = loop.create_future()
            for queued in batch:
                queued.batch = ended
            results = await loop.run_in_executor(self._thread, self._run_isolated, [q.work for q in batch])
            ended.set_result(None)
            for queued, result in zip(batch, results, strict=True):
                if queued.answer.done():
                    continue
                if isinstance(result, Exception):
                    queued.answer.set_exception(result)
                else:
                    queued.answer.set_result(result)

    def _take(self) -> list[_Queued[Work, Result]]:
        """The next batch: from the head of the queue, without reordering, up to the budget."""
        batch: list[_Queued[Work, Result]] = []
        tokens = 0
        while self._queue and len(batch) < self._max_items:
            head = self._queue[0]
            if not head.answer.done():
                if batch and tokens + head.num_tokens > self._max_tokens:
                    break
                batch.append(head)
                tokens += head.num_tokens
            self._queue.popleft()
            self._queued_tokens -= head.num_tokens
        return batch

    def _run_isolated(self, batch: Sequence[Work]) -> Sequence[Result | Exception]:
        try:
            return self._run(batch)
        except Exception as error:  # noqa: BLE001  the boundary between an item's failure and the stage
            if len(batch) == 1:
                return [error]
            return [result for work in batch for result in self._run_isolated([work])]
