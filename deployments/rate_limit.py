"""How often one caller may ask: a token bucket."""

from __future__ import annotations

from collections.abc import Callable

from epd.deployments.errors import RateLimited


class TokenBucket:
    """Takes `burst` requests at once and `per_minute` in the long run.

    clock: seconds that only go forward. Not for use from several threads.
    """

    def __init__(self, per_minute: int, burst: int, clock: Callable[[], float]) -> None:
        self._per_second = per_minute / 60
        self._burst = burst
        self._clock = clock
        self._tokens = float(burst)
        self._last = clock()

    def take(self) -> None:
        """Counts one request. Raises RateLimited, which says when the next one is taken."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._last) * self._per_second)
        self._last = now
        if self._tokens < 1:
            raise RateLimited(
                f"this key may send {self._per_second * 60:.0f} requests a minute",
                (1 - self._tokens) / self._per_second,
            )
        self._tokens -= 1
