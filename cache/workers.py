"""Threads for calls that may block or hang, and how an event loop hears of their end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from threading import Condition, Thread
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class JobState(Enum):
    QUEUED = auto()
    RUNNING = auto()
    ENDED = auto()
    """The call has returned or raised: nothing of it touches memory any more."""
    CANCELLED = auto()
    """Taken back before it began."""


class Job(Generic[T]):
    """One call on a worker thread. `future` is resolved on the loop when it has ended.

    Do not cancel `future`: await it through `asyncio.shield` or `asyncio.wait`.
    """

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.loop = loop
        self.future: asyncio.Future[T] = loop.create_future()
        self.state = JobState.QUEUED

    def run(self) -> None:
        result: T | None = None
        raised: BaseException | None = None
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001  the thread's outermost boundary: whoever awaits gets it
            raised = error
        del self.call
        try:
            self.loop.call_soon_threadsafe(self._resolve, result, raised)
        except RuntimeError:  # the loop is closed, and with it everyone who could wait
            self.state = JobState.ENDED

    def _resolve(self, result: Any, raised: BaseException | None) -> None:
        self.state = JobState.ENDED
        if self.future.done():
            return
        if raised is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(raised)


class JobRunner(Protocol):
    """What a cache uses of Workers; tests bring their own, which run jobs when told."""

    @property
    def num_hung(self) -> int: ...

    def submit(self, call: Callable[[], T]) -> Job[T] | None: ...

    def give_up(self, job: Job[Any]) -> bool: ...

    def close(self) -> None: ...


class MakeRunner(Protocol):
    """Makes a runner of `num_threads` threads for jobs of one kind."""

    def __call__(self, name: str, *, num_threads: int, max_queued: int) -> JobRunner: ...


class Workers:
    """`num_threads` daemon threads behind a queue of at most `max_queued` jobs.

    Daemon threads, so that a call that hangs for good does not hold up the end of the process. A thread
    whose job was given up (`give_up`) is replaced, up to `max_hung` times at once.
    """

    def __init__(self, name: str, *, num_threads: int, max_queued: int, max_hung: int = 4) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_queued = max_queued
        self._max_hung = max_hung
        self._changed = Condition()
        self._queue: deque[Job[Any]] = deque()
        self._running: set[Job[Any]] = set()
        self._hung: set[Job[Any]] = set()
        self._num_alive = 0
        self._closed = False

    @property
    def num_hung(self) -> int:
        """Jobs that were given up and still run."""
        return len(self._hung)

    def submit(self, call: Callable[[], T]) -> Job[T] | None:
        """The job, or None when the queue is full or the workers are closed. Called on an event loop."""
        job = Job(call, asyncio.get_running_loop())
        with self._changed:
            if self._closed or len(self._queue) >= self._max_queued:
                return None
            self._queue.append(job)
            self._keep_threads()
            self._changed.notify()
        return job

    def give_up(self, job: Job[Any]) -> bool:
        """True when `job` was taken back before it began; False when it runs on, or has ended."""
        with self._changed:
            if job.state is JobState.QUEUED:
                job.state = JobState.CANCELLED
                self._queue.remove(job)
                job.future.cancel()
                return True
            if job in self._running:
                self._hung.add(job)
                self._keep_threads()
            return False

    def close(self) -> None:
        """Takes no more jobs. Those that were taken are still run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _keep_threads(self) -> None:
        wanted = self._num_threads + min(len(self._hung), self._max_hung)
        while self._num_alive < wanted and not self._closed:
            self._num_alive += 1
            Thread(target=self._work, name=f"epd-{self._name}", daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                self._running.discard(job)
                self._hung.discard(job)
            del job

    def _next(self) -> Job[Any] | None:
        with self._changed:
            while not self._queue:
                if self._closed or self._num_alive > self._num_threads + len(self._hung):
                    self._num_alive -= 1
                    return None
                self._changed.wait()
            job = self._queue.popleft()
            job.state = JobState.RUNNING
            self._running.add(job)
            return job
