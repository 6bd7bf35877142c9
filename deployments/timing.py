"""Where a request's time goes: each step's seconds, for the request that asked and for the histograms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

# The steps, in the order in which a request meets them.
STEPS = ("prepare", "lookup", "decode", "queue", "encode", "copy", "publish", "fetch", "prefill", "total")

# The request's own record. Tasks that a request starts share it.
_current: ContextVar[dict[str, float] | None] = ContextVar("epd_timings", default=None)

Observe = Callable[[str, float], None]


class Timings:
    """Records steps. observe: called with each step's name and seconds, such as a histogram's."""

    def __init__(self, observe: Observe = lambda step, seconds: None) -> None:
        self._observe = observe

    @contextmanager
    def collect(self) -> Iterator[dict[str, float]]:
        """Within it, and in tasks started there, steps are collected: the longest of each, in seconds."""
        collected: dict[str, float] = {}
        token = _current.set(collected)
        try:
            yield collected
        finally:
            _current.reset(token)

    def record(self, step: str, seconds: float) -> None:
        """Parallel steps of one name count by the longest."""
        assert step in STEPS, step
        self._observe(step, seconds)
        merge({step: seconds})

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Records what it encloses, however it ends."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(name, time.perf_counter() - start)


def merge(timings: Mapping[str, float], prefix: str = "") -> None:
    """Adds what another stage measured to the current request's record."""
    collected = _current.get()
    if collected is not None:
        for step, seconds in timings.items():
            name = prefix + step
            collected[name] = max(seconds, collected.get(name, 0.0))


def server_timing(timings: Mapping[str, float]) -> str:
    """The steps as a Server-Timing header's value, in milliseconds (https://www.w3.org/TR/server-timing/)."""
    return ", ".join(f"{step.replace('.', '_')};dur={seconds * 1e3:.2f}" for step, seconds in timings.items())
