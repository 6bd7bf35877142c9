"""An event loop and threads whose time and progress are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from epd.cache.workers import Job, JobState

T = TypeVar("T")


class FakeTimeLoop(asyncio.SelectorEventLoop):
    """Its clock moves when told."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def step(self, times: int = 50) -> None:
        """Runs what is ready, `times` times over: once is the least progress that there is."""
        for _ in range(times):
            self.call_soon(self.stop)
            self.run_forever()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.step()


class FakeRunner:
    """Jobs that begin and end when told. Until it has ended, a job that began may still write its pages."""

    def __init__(self, name: str, *, num_threads: int, max_queued: int) -> None:
        self.name = name
        self.max_queued = max_queued
        self.queued: list[Job[Any]] = []
        self.running: list[Job[Any]] = []
        self.hung: set[Job[Any]] = set()
        self.is_closed = False

    @property
    def num_hung(self) -> int:
        return len(self.hung)

    def submit(self, call: Callable[[], T]) -> Job[T] | None:
        if self.is_closed or len(self.queued) >= self.max_queued:
            return None
        job = Job(call, asyncio.get_running_loop())
        self.queued.append(job)
        return job

    def give_up(self, job: Job[Any]) -> bool:
        if job in self.queued:
            self.queued.remove(job)
            job.state = JobState.CANCELLED
            job.future.cancel()
            return True
        if job in self.running:
            self.hung.add(job)
        return False

    def close(self) -> None:
        self.is_closed = True

    def begin(self) -> None:
        """The oldest job in line begins."""
        if self.queued:
            job = self.queued.pop(0)
            job.state = JobState.RUNNING
            self.running.append(job)

    def end(self, index: int = 0) -> None:
        """A running job does its work and ends."""
        if self.running:
            job = self.running.pop(index % len(self.running))
            self.hung.discard(job)
            job.run()
