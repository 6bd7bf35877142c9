"""Worker threads: what is queued, taken back, hung and replaced."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from epd.cache.workers import JobState, Workers


async def test_a_job_resolves_its_future_on_the_loop() -> None:
    """With the result of the call, or with what it raised."""
    workers = Workers("test", num_threads=1, max_queued=2)
    good, bad = workers.submit(lambda: 7), workers.submit(lambda: int("x"))
    assert good is not None
    assert bad is not None
    assert await good.future == 7
    with pytest.raises(ValueError):
        await bad.future
    workers.close()


async def test_a_full_queue_refuses_jobs() -> None:
    """What exceeds the queue is None at once; closed workers refuse everything."""
    workers = Workers("test", num_threads=1, max_queued=1)
    began, gate = Event(), Event()

    def block() -> None:
        began.set()
        gate.wait()

    running = workers.submit(block)
    await asyncio.to_thread(began.wait)
    queued = workers.submit(lambda: 1)
    assert running is not None
    assert queued is not None
    assert workers.submit(lambda: 2) is None
    gate.set()
    assert await queued.future == 1
    workers.close()
    assert workers.submit(lambda: 3) is None


async def test_a_queued_job_can_be_taken_back() -> None:
    """It never runs, and its future is cancelled."""
    workers = Workers("test", num_threads=1, max_queued=2)
    began, gate = Event(), Event()

    def block() -> None:
        began.set()
        gate.wait()

    running = workers.submit(block)
    await asyncio.to_thread(began.wait)
    ran = []
    queued = workers.submit(lambda: ran.append(1))
    assert running is not None
    assert queued is not None
    assert workers.give_up(queued)
    assert queued.state is JobState.CANCELLED
    assert queued.future.cancelled()
    gate.set()
    await running.future
    assert not ran
    workers.close()


async def test_a_hung_thread_is_replaced_and_its_end_is_still_told() -> None:
    """Once a running job is given up others run; when it ends, its future is resolved and it is not hung."""
    workers = Workers("test", num_threads=1, max_queued=8)
    began, gate = Event(), Event()

    def block() -> str:
        began.set()
        gate.wait()
        return "late"

    hung = workers.submit(block)
    assert hung is not None
    await asyncio.to_thread(began.wait)
    assert not workers.give_up(hung)
    assert workers.num_hung == 1
    other = workers.submit(lambda: "served")
    assert other is not None
    assert await other.future == "served"
    gate.set()
    assert await hung.future == "late"
    last = workers.submit(lambda: "after")
    assert last is not None
    await last.future
    assert workers.num_hung == 0
    workers.close()


async def test_hung_threads_are_replaced_up_to_a_bound() -> None:
    """A store that hangs for ever takes no more than so many threads."""
    workers = Workers("test", num_threads=1, max_queued=8, max_hung=2)
    gate = Event()
    began = [Event() for _ in range(3)]

    def block(event: Event) -> None:
        event.set()
        gate.wait()

    jobs = []
    for event in began:
        job = workers.submit(lambda event=event: block(event))  # type: ignore[misc]
        assert job is not None
        await asyncio.to_thread(event.wait)
        workers.give_up(job)
        jobs.append(job)
    queued = workers.submit(lambda: "served")
    assert queued is not None
    assert workers.num_hung == 3
    assert queued.state is JobState.QUEUED
    gate.set()
    assert await queued.future == "served"
    await asyncio.gather(*(job.future for job in jobs))
    workers.close()


async def test_closed_workers_still_run_what_they_took() -> None:
    """Jobs in the queue at close are run."""
    workers = Workers("test", num_threads=1, max_queued=8)
    jobs = [workers.submit(lambda number=number: number) for number in range(5)]  # type: ignore[misc]
    workers.close()
    assert [await job.future for job in jobs if job is not None] == [0, 1, 2, 3, 4]
