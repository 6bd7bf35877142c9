"""Batches by token budget, in arrival order, whenever the device is free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from epd.deployments.batching import TokenBatcher
from epd.deployments.errors import Overloaded


class FakeDevice:
    """Runs batches of integers, each at its gate; remembers them; fails on negative work."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.prepared: list[list[int]] = []
        self.gate = threading.Semaphore(0)
        self.preparing = threading.Semaphore(0)
        self.started = threading.Semaphore(0)

    def prepare(self, batch: Sequence[int]) -> Sequence[int]:
        if 13 in batch:
            raise ValueError(f"nothing to prepare for {list(batch)}")
        self.prepared.append(list(batch))
        self.preparing.release()
        return batch

    def run(self, batch: Sequence[int]) -> Sequence[int | Exception]:
        self.started.release()
        self.gate.acquire()
        self.batches.append(list(batch))
        if any(work < 0 for work in batch):
            raise ValueError(f"negative work in {list(batch)}")
        return [work * 10 for work in batch]

    def open(self, times: int = 100) -> None:
        self.gate.release(times)


def make(device: FakeDevice, **limits: int) -> TokenBatcher[int, Sequence[int], int]:
    return TokenBatcher(
        device.prepare,
        device.run,
        max_tokens=10,
        max_items=limits.get("max_items", 4),
        max_queued_tokens=limits.get("max_queued_tokens", 100),
        step="prefill",
    )


async def submit_behind_a_running_batch(
    batcher: TokenBatcher[int, Sequence[int], int], device: FakeDevice, work: list[tuple[int, int]]
) -> list[asyncio.Task[int]]:
    """Starts one item, waits until it runs, then queues the others behind it."""
    first = asyncio.create_task(batcher.submit(0, 1))
    await asyncio.to_thread(device.started.acquire)
    others = [asyncio.create_task(batcher.submit(*item)) for item in work]
    await asyncio.sleep(0)
    return [first, *others]


async def test_what_waits_runs_together_within_the_budget() -> None:
    """While one batch runs others gather; they leave in order, up to the token budget."""
    device = FakeDevice()
    batcher = make(device)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 4), (2, 4), (3, 4), (4, 4)])
    device.open()
    assert await asyncio.gather(*tasks) == [0, 10, 20, 30, 40]
    assert device.batches == [[0], [1, 2], [3, 4]]
    await batcher.close()


async def test_an_item_larger_than_the_budget_runs_alone() -> None:
    """A large item is neither starved nor mixed with others."""
    device = FakeDevice()
    batcher = make(device)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 50), (2, 1), (3, 1)])
    device.open()
    await asyncio.gather(*tasks)
    assert device.batches == [[0], [1], [2, 3]]
    await batcher.close()


async def test_batches_are_bounded_by_items() -> None:
    """No batch has more than `max_items` items."""
    device = FakeDevice()
    batcher = make(device, max_items=2)
    tasks = await submit_behind_a_running_batch(batcher, device, [(i, 1) for i in range(1, 6)])
    device.open()
    await asyncio.gather(*tasks)
    assert device.batches == [[0], [1, 2], [3, 4], [5]]
    await batcher.close()


async def test_one_bad_item_fails_alone() -> None:
    """Items beside one whose batch raised are answered all the same."""
    device = FakeDevice()
    batcher = make(device)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 1), (-2, 1), (3, 1)])
    device.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [results[i] for i in (0, 1, 3)] == [0, 10, 30]
    assert isinstance(results[2], ValueError)
    await batcher.close()


async def test_a_full_queue_refuses_at_once() -> None:
    """Beyond `max_queued_tokens` a submit raises Overloaded with the numbers."""
    device = FakeDevice()
    batcher = make(device, max_queued_tokens=10)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 8)])
    with pytest.raises(Overloaded, match="8 tokens wait already and the queue takes 10"):
        await batcher.submit(2, 3)
    device.open()
    await asyncio.gather(*tasks)
    assert batcher.queued_tokens == 0
    await batcher.close()


async def test_cancelled_work_leaves_the_queue() -> None:
    """An item whose caller has gone is never run."""
    device = FakeDevice()
    batcher = make(device)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 1), (2, 1)])
    tasks[1].cancel()
    await asyncio.sleep(0)
    device.open()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert device.batches == [[0], [2]]
    await batcher.close()


async def test_a_running_item_is_awaited_when_cancelled() -> None:
    """What a running item reads stays until its batch has ended, also when its caller goes."""
    device = FakeDevice()
    batcher = make(device)
    task = asyncio.create_task(batcher.submit(1, 1))
    await asyncio.to_thread(device.started.acquire)
    task.cancel()
    await asyncio.wait([task], timeout=0.05)
    assert not task.done()
    device.open()
    await asyncio.wait([task])
    assert task.cancelled()
    assert device.batches == [[1]]
    await batcher.close()


async def test_a_full_batch_is_prepared_while_another_runs() -> None:
    """What fills a batch is prepared under the running one; what does not fill one waits for more."""
    device = FakeDevice()
    batcher = make(device)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 6), (2, 4), (3, 1)])
    await asyncio.to_thread(device.preparing.acquire)
    await asyncio.to_thread(device.preparing.acquire)
    assert device.prepared == [[0], [1, 2]]
    assert batcher.queued_tokens == 1
    tasks.append(asyncio.create_task(batcher.submit(4, 1)))
    await asyncio.sleep(0)
    device.open()
    await asyncio.gather(*tasks)
    assert device.batches == [[0], [1, 2], [3, 4]]
    assert batcher.waiting_tokens == 0
    await batcher.close()


async def test_an_item_that_cannot_be_prepared_fails_alone() -> None:
    """A failure to prepare is the item's own, as a failure to run is."""
    device = FakeDevice()
    batcher = make(device)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 1), (13, 1), (3, 1)])
    device.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [results[i] for i in (0, 1, 3)] == [0, 10, 30]
    assert isinstance(results[2], ValueError)
    await batcher.close()


async def test_close_runs_what_waits() -> None:
    """Closing drains the queue."""
    device = FakeDevice()
    batcher = make(device)
    tasks = await submit_behind_a_running_batch(batcher, device, [(1, 8), (2, 8)])
    closing = asyncio.create_task(batcher.close())
    device.open()
    await closing
    assert await asyncio.gather(*tasks) == [0, 10, 20]
