"""The line of requests that wait for room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from epd.cache.errors import CacheClosed, PoolBusy
from epd.cache.pressure import PressureQueue


class FakeRoom:
    """So many units; an attempt takes what it needs or nothing."""

    def __init__(self, units: int) -> None:
        self.units = units
        self.num_attempts = 0
        self.queue: PressureQueue[int] = PressureQueue(self.give_back, timeout_s=5.0)

    def give_back(self, units: int) -> None:
        self.units += units
        self.queue.wake()

    def taking(self, units: int) -> Callable[[], int | None]:
        def attempt() -> int | None:
            self.num_attempts += 1
            if units > self.units:
                return None
            self.units -= units
            return units

        return attempt

    def wait(self, units: int) -> asyncio.Task[int]:
        return asyncio.create_task(self.queue.wait(self.taking(units)))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_with_nobody_in_line_an_attempt_is_made_at_once() -> None:
    """It gets what there is, or None."""
    room = FakeRoom(3)
    assert room.queue.try_now(room.taking(2)) == 2
    assert room.queue.try_now(room.taking(2)) is None


async def test_nobody_passes_who_waits() -> None:
    """While one waits a smaller one does not even try."""
    room = FakeRoom(1)
    large = room.wait(2)
    await settle()
    assert room.queue.try_now(room.taking(1)) is None
    assert (room.num_attempts, len(room.queue)) == (0, 1)
    room.give_back(1)
    assert await large == 2


async def test_all_that_fit_are_served_in_order() -> None:
    """One wake serves from the head of the line until one does not fit."""
    room = FakeRoom(0)
    tasks = [room.wait(units) for units in (1, 2, 2, 1)]
    await settle()
    room.give_back(4)
    await settle()
    assert [task.done() for task in tasks] == [True, True, False, False]
    room.give_back(2)
    assert await asyncio.gather(*tasks) == [1, 2, 2, 1]
    assert room.units == 0


async def test_who_leaves_the_head_of_the_line_lets_the_next_one_try() -> None:
    """The next may fit where the one that left did not."""
    room = FakeRoom(1)
    large, small = room.wait(2), room.wait(1)
    await settle()
    large.cancel()
    assert await small == 1
    assert len(room.queue) == 0


async def test_what_came_too_late_is_given_back() -> None:
    """A request cancelled in the moment it is served keeps nothing."""
    room = FakeRoom(0)
    task = room.wait(2)
    await settle()
    room.give_back(2)
    await asyncio.sleep(0)  # served, and not yet awake
    assert room.units == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.units == 2


async def test_who_left_before_being_served_is_passed_over() -> None:
    """A request cancelled after the wake and before its turn makes no attempt."""
    room = FakeRoom(0)
    first, second = room.wait(1), room.wait(1)
    await settle()
    room.give_back(1)
    first.cancel()
    assert await second == 1
    assert room.num_attempts == 1


async def test_waiting_in_vain_ends_with_pool_busy() -> None:
    """The error tells the time waited; the line is empty again."""
    queue: PressureQueue[int] = PressureQueue(lambda taken: None, timeout_s=0.01)
    with pytest.raises(PoolBusy, match=r"within 0\.01 s"):
        await queue.wait(lambda: None)
    assert len(queue) == 0


async def test_fail_all_ends_every_wait() -> None:
    """With the error given."""
    room = FakeRoom(0)
    tasks = [room.wait(1), room.wait(2)]
    await settle()
    room.queue.fail_all(CacheClosed("closed"))
    for task in tasks:
        with pytest.raises(CacheClosed):
            await task
    assert len(room.queue) == 0
