"""How long an event loop was kept from running: a gauge that costs a timer every few milliseconds."""

from __future__ import annotations

import asyncio
from collections import deque


class LoopLag:
    """The longest time of the last `window_s` seconds in which the loop ran nothing, to within `interval_s`.

    A timer is due every `interval_s`; how late it comes is how long something held the loop, or the machine
    gave this process no CPU.
    """

    def __init__(self, *, interval_s: float = 0.02, window_s: float = 10.0) -> None:
        self._interval_s = interval_s
        self._window_s = window_s
        self._lates: deque[tuple[float, float]] = deque()
        """(when, how late), each later than all after it: the first is the longest."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Call it on the loop to be watched."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._interval_s
        self._timer = loop.call_at(due, self._tick, loop, due)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def longest_s(self) -> float:
        return self._lates[0][1] if self._lates else 0.0

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        while self._lates and self._lates[-1][1] <= now - due:
            self._lates.pop()
        self._lates.append((now, now - due))
        while self._lates[0][0] < now - self._window_s:
            self._lates.popleft()
        self.start()
