"""The token bucket, on a clock of its own."""

from __future__ import annotations

import pytest

from epd.deployments.errors import RateLimited
from epd.deployments.rate_limit import TokenBucket


class FakeClock:
    """Seconds that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_is_taken_and_then_the_rate() -> None:
    """`burst` requests come at once; after them one each `60 / per_minute` seconds."""
    clock = FakeClock()
    bucket = TokenBucket(per_minute=30, burst=2, clock=clock)
    bucket.take()
    bucket.take()
    with pytest.raises(RateLimited, match="30 requests a minute") as raised:
        bucket.take()
    assert raised.value.retry_after_s == 2
    clock.now += 2
    bucket.take()
    with pytest.raises(RateLimited):
        bucket.take()


def test_what_is_not_used_is_not_saved_beyond_the_burst() -> None:
    """After a long pause no more than `burst` requests come at once."""
    clock = FakeClock()
    bucket = TokenBucket(per_minute=60, burst=1, clock=clock)
    clock.now += 1000
    bucket.take()
    with pytest.raises(RateLimited):
        bucket.take()


def test_refused_requests_cost_nothing() -> None:
    """Asking too often does not push the next permit further away."""
    clock = FakeClock()
    bucket = TokenBucket(per_minute=60, burst=1, clock=clock)
    bucket.take()
    for _ in range(5):
        with pytest.raises(RateLimited):
            bucket.take()
    clock.now += 1
    bucket.take()
