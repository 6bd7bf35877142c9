"""A child process that is started again when it dies, and dies with this one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Condition, Event, Lock, Thread, Timer

from epd.cache.errors import StoreUnavailable
from epd.cache.stores import parent_death

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_FIRST_DELAY_S = 0.2  # before a restart; doubled after each that failed
_MAX_DELAY_S = 5.0
_TAIL_LINES = 20

Child = subprocess.Popen[str]


class Output:
    """What a child writes, read by a thread of its own so that the child never waits for a reader."""

    def __init__(self, name: str, child: Child) -> None:
        self._name = name
        self._child = child
        self._changed = Condition()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._ended = False
        self._thread = Thread(target=self._read, name=f"epd-{name}-output", daemon=True)
        self._thread.start()

    def wait_for(self, line: str) -> bool:
        """Blocks until the child has written `line`; False when it ended without."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or line in self._tail)
            return line in self._tail

    def last_words(self) -> str:
        """The last lines of a child that has ended."""
        self._thread.join()
        return "\n".join(self._tail)

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout:
            for line in self._child.stdout:
                logger.debug("%s: %s", self._name, line.rstrip())
                with self._changed:
                    self._tail.append(line.rstrip())
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class SupervisedProcess:
    """Runs `command`. `await_ready` blocks until the child serves; StoreUnavailable when it dies first.

    One thread per child starts it each time and waits for its end: the parent-death signal comes when
    the *thread* that started a child ends.
    """

    def __init__(
        self, name: str, command: Sequence[str], await_ready: Callable[[Child, Output], None]
    ) -> None:
        self.num_restarts = 0
        self._name = name
        self._command = command
        self._await_ready = await_ready
        self._lock = Lock()
        self._child: Child | None = None
        self._stopping = Event()
        self._tried = Event()
        self._failure: StoreUnavailable | None = None
        self._thread = Thread(target=self._supervise, name=f"epd-{name}", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of the child, or None while there is none."""
        with self._lock:
            return self._child.pid if self._child is not None and self._child.poll() is None else None

    def start(self) -> None:
        """Returns once the child serves. Raises StoreUnavailable, with its last words, when it does not."""
        self._thread.start()
        self._tried.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure

    def stop(self) -> None:
        """Ends the child and waits for its end. May be called twice, or before `start`."""
        self._stopping.set()
        with self._lock:
            child = self._child
        if child is None:
            return
        child.terminate()
        killer = Timer(_STOP_TIMEOUT_S, child.kill)
        killer.start()
        self._thread.join()
        killer.cancel()

    def _supervise(self) -> None:
        delay = _FIRST_DELAY_S
        while not self._stopping.is_set():
            try:
                child = self._launch()
                delay = _FIRST_DELAY_S
                self._tried.set()
                status = child.wait()
                if not self._stopping.is_set():
                    logger.warning("%s ended with status %d, starting it again", self._name, status)
            except StoreUnavailable as error:
                if not self._tried.is_set():
                    self._failure = error
                    self._tried.set()
                    return
                logger.warning("%s", error)
                delay = min(2 * delay, _MAX_DELAY_S)
            if not self._stopping.wait(delay):
                self.num_restarts += 1

    def _launch(self) -> Child:
        """A child that serves. Raises StoreUnavailable."""
        wrapper = [sys.executable, "-I", "-S", str(Path(parent_death.__file__)), str(os.getpid())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            child = subprocess.Popen(
                [*wrapper, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
            )
        except OSError as error:
            raise StoreUnavailable(f"{self._name} cannot be started: {error}") from error
        with self._lock:
            self._child = child
        output = Output(self._name, child)
        killer = Timer(_START_TIMEOUT_S, child.kill)
        killer.start()
        if self._stopping.is_set():  # `stop` saw no child yet
            child.terminate()
        try:
            self._await_ready(child, output)
        except StoreUnavailable as error:
            child.kill()
            status = child.wait()
            words = output.last_words() or str(error)
            raise StoreUnavailable(f"{self._name} did not start (status {status}): {words}") from error
        finally:
            killer.cancel()
        return child
