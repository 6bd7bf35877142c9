"""The gauge of an event loop's longest block."""

from __future__ import annotations

import asyncio
import time

from epd.deployments.loop_lag import LoopLag


async def ticks(count: int, interval_s: float = 0.001) -> None:
    """Lets timers of `interval_s` run about so often."""
    for _ in range(count):
        await asyncio.sleep(interval_s)


async def test_a_block_is_measured() -> None:
    """What holds the loop for 50 ms shows as at least 49 ms with a timer each millisecond."""
    lag = LoopLag(interval_s=0.001)
    lag.start()
    await ticks(3)
    time.sleep(0.05)  # noqa: ASYNC251  the block itself
    await ticks(3)
    lag.stop()
    assert lag.longest_s >= 0.049


async def test_an_old_block_is_forgotten() -> None:
    """A block older than the window no longer counts."""
    lag = LoopLag(interval_s=0.001, window_s=0.02)
    lag.start()
    time.sleep(0.2)  # noqa: ASYNC251  the block itself
    await ticks(3)
    blocked = lag.longest_s
    while lag.longest_s == blocked:
        await ticks(1)
    lag.stop()
    assert lag.longest_s < blocked


async def test_a_gauge_never_started_says_zero() -> None:
    """Before its first timer there is nothing to tell."""
    assert LoopLag().longest_s == 0.0
