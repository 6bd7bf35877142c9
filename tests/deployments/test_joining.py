"""Work done once for all who ask at the same time."""

from __future__ import annotations

import asyncio

import pytest

from epd.deployments.joining import InFlight


class FakeWork:
    """Counts its starts and cancellations; ends when told, with `error` if there is one."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.error: Exception | None = None
        self.num_starts = 0
        self.num_cancelled = 0

    async def run(self) -> int:
        self.num_starts += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return self.num_starts


async def asked(flight: InFlight[str, int], work: FakeWork, count: int) -> list[asyncio.Task[int]]:
    """Tasks that have all asked for the same key."""
    tasks = [asyncio.create_task(flight.run("key", work.run)) for _ in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def test_all_who_ask_meanwhile_share_one_run() -> None:
    """Three who ask while the work runs have the same result of one run; who asks later has a new one."""
    flight, work = InFlight[str, int](), FakeWork()
    tasks = await asked(flight, work, 3)
    work.gate.set()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert await flight.run("key", work.run) == 2
    assert len(flight) == 0


async def test_one_that_is_cancelled_leaves_the_others_alone() -> None:
    """The one that started the work leaves; the other has its result."""
    flight, work = InFlight[str, int](), FakeWork()
    first, second = await asked(flight, work, 2)
    first.cancel()
    work.gate.set()
    assert await second == 1
    assert first.cancelled()
    assert work.num_cancelled == 0


async def test_work_that_nobody_waits_for_is_cancelled() -> None:
    """When all have left the work ends, and the next one to ask does not get the cancelled run."""
    flight, work = InFlight[str, int](), FakeWork()
    tasks = await asked(flight, work, 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    (late,) = await asked(flight, work, 1)
    assert (work.num_starts, work.num_cancelled) == (2, 1)
    work.gate.set()
    assert await late == 2


async def test_an_error_reaches_all() -> None:
    """Everyone who waits gets the work's error, and the next one to ask tries anew."""
    flight, work = InFlight[str, int](), FakeWork()
    work.error = ValueError("unreadable")
    tasks = await asked(flight, work, 2)
    work.gate.set()
    for task in tasks:
        with pytest.raises(ValueError, match="unreadable"):
            await task
    work.error = None
    assert await flight.run("key", work.run) == 2
