"""A circuit breaker: stops asking what keeps failing, and finds out when it works again."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from threading import Lock


class BreakerState(IntEnum):
    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


class CircuitBreaker:
    """Opens after `max_failures` failed calls in a row, or while a call is overdue; probes every `probe_s`.

    A call that takes longer than `timeout_s` counts as failed, also when it never ends: while it hangs,
    nothing more is let through. When open, one call is let through each `probe_s`: its success
    closes the breaker. Thread-safe. `clock` in seconds.
    """

    def __init__(
        self,
        *,
        max_failures: int = 3,
        timeout_s: float,
        probe_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._timeout_s = timeout_s
        self._probe_s = probe_s
        self._clock = clock
        self._lock = Lock()
        self._failures = 0
        self._opened_at: float | None = None
        self._probe: int | None = None
        self._started: dict[int, float] = {}
        self._num_calls = 0

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._opened_at is None:
                return BreakerState.OPEN if self._is_overdue(self._clock()) else BreakerState.CLOSED
            return BreakerState.OPEN if self._probe is None else BreakerState.HALF_OPEN

    def admit(self) -> int | None:
        """A number to give to `report` when the call has ended, or None: do not call."""
        with self._lock:
            now = self._clock()
            if self._is_overdue(now):
                self._opened_at = now
                return None
            is_probe = self._opened_at is not None
            if self._opened_at is not None and (self._probe or now - self._opened_at < self._probe_s):
                return None
            self._num_calls += 1
            if is_probe:
                self._probe = self._num_calls
            self._started[self._num_calls] = now
            return self._num_calls

    def report(self, call: int, *, failed: bool) -> None:
        """Tells how an admitted call ended. Must be called exactly once for each."""
        with self._lock:
            now = self._clock()
            took_s = now - self._started.pop(call)
            if call == self._probe:
                self._probe = None
            if not failed and took_s <= self._timeout_s:
                self._failures = 0
                self._opened_at = None
                return
            self._failures += 1
            if self._opened_at is not None or self._failures >= self._max_failures:
                self._opened_at = now

    def _is_overdue(self, now: float) -> bool:
        return any(now - started > self._timeout_s for started in self._started.values())
