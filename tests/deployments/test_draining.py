"""What is in progress when a service is told to end."""

from __future__ import annotations

import asyncio

import pytest

from epd.deployments.draining import InProgress
from epd.deployments.errors import StageUnavailable


async def test_what_has_begun_ends_and_nothing_new_begins() -> None:
    """`drain` returns when the last request has ended, and new ones are turned away at once."""
    requests, gate = InProgress(), asyncio.Event()

    async def work() -> None:
        with requests.request():
            await gate.wait()

    running = [asyncio.create_task(work()) for _ in range(2)]
    await asyncio.sleep(0)
    draining = asyncio.create_task(requests.drain())
    await asyncio.sleep(0)
    assert not draining.done()
    with pytest.raises(StageUnavailable, match="ending"), requests.request():
        pass
    gate.set()
    await draining
    assert all(task.done() for task in running)


async def test_a_service_at_rest_is_drained_at_once() -> None:
    """Also after a request that failed."""
    requests = InProgress()
    with pytest.raises(ZeroDivisionError), requests.request():
        raise ZeroDivisionError
    async with asyncio.timeout(1):
        await requests.drain()
