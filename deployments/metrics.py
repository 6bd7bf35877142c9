"""Prometheus metrics through Ray's own: what a replica counts, exported as it changes.

Ray adds `ray_` to each name, and tags deployment and replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from ray.serve import metrics

_SECONDS = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
_TOKENS = [16.0, 64.0, 256.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0]
_ITEMS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]

_EXPORT_INTERVAL_S = 5.0

# Levels of this moment; every other number that a replica counts only grows.
_LEVELS = {
    "queued_tokens",
    "pages",
    "pages_free",
    "pages_draining",
    "entries",
    "pins",
    "filling",
    "waiting",
    "puts_running",
    "calls_hung",
    "breaker_state",
    "kv_pages",
    "kv_pages_free",
    "kv_pages_cached",
    "kv_leases",
    "known_keys",
    "loop_block_ms",
}

Stats = Callable[[], Awaitable[Mapping[str, Any]]]


class Sink(Protocol):
    """Where numbers go: Ray's metrics, or a test's list."""

    def count(self, name: str, increase: float) -> None:
        """increase: 0 or more."""
        ...

    def level(self, name: str, value: float) -> None: ...


class RaySink:
    """`epd_events_total{event=...}` for what grows, `epd_level{level=...}` for levels."""

    def __init__(self) -> None:
        self._events = metrics.Counter(
            "epd_events_total", "what a replica counted, by event", tag_keys=("event",)
        )
        self._levels = metrics.Gauge("epd_level", "levels of a replica, by name", tag_keys=("level",))

    def count(self, name: str, increase: float) -> None:
        self._events._record(increase, {"event": name})  # `inc` is the same, but refuses 0

    def level(self, name: str, value: float) -> None:
        self._levels.set(value, {"level": name})


class StageMetrics:
    """Histograms of a stage: seconds of each step, and what its batches hold."""

    def __init__(self) -> None:
        self._seconds = metrics.Histogram(
            "epd_step_seconds", "seconds of each step", boundaries=_SECONDS, tag_keys=("step",)
        )
        self._tokens = metrics.Histogram("epd_batch_tokens", "tokens of a batch", boundaries=_TOKENS)
        self._items = metrics.Histogram("epd_batch_items", "items of a batch", boundaries=_ITEMS)

    def observe_step(self, step: str, seconds: float) -> None:
        self._seconds.observe(seconds, {"step": step})

    def observe_batch(self, num_items: int, num_tokens: int) -> None:
        self._items.observe(num_items)
        self._tokens.observe(num_tokens)


class Exporter:
    """Exports a replica's stats every few seconds: levels as they are, counts by their increase.

    A count is there from the first round on, at 0: a query that adds up several finds them all.
    """

    def __init__(self, stats: Stats, sink: Sink | None = None) -> None:
        self._stats = stats
        self._sink = sink or RaySink()
        self._last: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Call it on the replica's event loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def export(self) -> None:
        """One round."""
        for name, value in _numbers(await self._stats()).items():
            if name in _LEVELS:
                self._sink.level(name, value)
            elif value != self._last.get(name):
                self._sink.count(name, value - self._last.get(name, 0))
                self._last[name] = value

    async def _run(self) -> None:
        while True:
            await self.export()
            await asyncio.sleep(_EXPORT_INTERVAL_S)


def _numbers(stats: Mapping[str, Any]) -> dict[str, float]:
    """Every counter and level of a replica's stats, the nested ones too, by its own name."""
    found: dict[str, float] = {}
    for name in stats.keys() - {"pid", "kv"}:
        value = stats[name]
        if isinstance(value, Mapping):
            found |= _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = value
    return found
