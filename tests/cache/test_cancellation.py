"""A cancellation, an error or a close in each moment: pages and pins return, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import torch

from epd.cache.controller import EmbeddingCache
from epd.cache.errors import CacheClosed
from epd.cache.pool import PagePool
from tests.cache.fake_loop import FakeRunner, FakeTimeLoop
from tests.cache.fakes import FakeStore
from tests.cache.tools import LAYOUT, PAGE_TOKENS, FakeEncoder, rows_of, wanted

MOST_STEPS = 100  # of the loop, which no scenario here needs


class World:
    """A cache of 6 pages whose threads run one call per step of the loop; the store holds picture 1."""

    def __init__(self) -> None:
        self.loop = FakeTimeLoop()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self.runners: list[FakeRunner] = []
        self.store = FakeStore()
        self.encoder = FakeEncoder()
        first = self.make_cache()
        self.run(self.fill_store(first))
        self.cache = self.make_cache()

    def make_cache(self) -> EmbeddingCache:
        pool = PagePool(LAYOUT, PAGE_TOKENS, 6, pin=False)
        return EmbeddingCache(pool, self.store, inline_copy_bytes=0, make_runner=self.make_runner)

    def make_runner(self, name: str, *, num_threads: int, max_queued: int) -> FakeRunner:
        self.runners.append(FakeRunner(name, num_threads=num_threads, max_queued=max_queued))
        return self.runners[-1]

    async def fill_store(self, cache: EmbeddingCache) -> None:
        cache.release((await self.encoder.hold(cache, wanted(1))).values())

    def step(self) -> None:
        """One iteration of the loop; each thread then ends what it ran, and begins what is in line."""
        self.loop.step(1)
        for runner in self.runners:
            runner.end()
            runner.begin()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = self.start(work)
        for _ in range(10 * MOST_STEPS):
            if task.done():
                return task.result()
            self.step()
        raise AssertionError("it never ends")

    def finish(self) -> None:
        """Whatever happened, the whole pool can be had, and nothing was lost on the way."""
        for _ in range(MOST_STEPS // 4):
            self.step()
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert (stats["pins"], stats["filling"], stats["pages_draining"], stats["waiting"]) == (0, 0, 0, 0)
        self.run(self.encode_and_release(20, 21, 22))
        assert not self.errors
        self.loop.close()

    async def encode_and_release(self, *numbers: int) -> None:
        """What an encoder does: acquire, fill, publish, release, whatever goes wrong."""
        items = [wanted(number) for number in numbers]
        acquired = await self.cache.acquire(items, claim=True, ask_store=True)
        handles = list(acquired.handles.values())
        try:
            for ticket in acquired.tickets.values():
                handles.append(await self.cache.fill(ticket, rows_of(ticket.wanted)))
            await self.cache.publish(handles)
            for handle in handles:
                assert torch.equal(torch.from_numpy(self.cache.rows(handle)), rows_of(handle.wanted))
        finally:
            self.cache.release(handles)
            self.cache.abandon(acquired.tickets.values())


SCENARIOS: dict[str, list[tuple[int, ...]]] = {
    "a store hit": [(1,)],
    "a new image": [(2,)],
    "a hit and a new image": [(1, 2)],
    "two that want the same": [(2,), (2, 3)],
    "three that want the same": [(1, 2), (2,), (2, 1)],
    "two that need most of the pool": [(1, 2), (3, 4)],
    "three in line": [(1, 2, 3), (4, 5), (3, 6)],
}


def all_steps(scenario: str) -> range:
    """From before the first step of a scenario to after its last."""
    world = World()
    tasks = [world.start(world.encode_and_release(*numbers)) for numbers in SCENARIOS[scenario]]
    for steps in range(MOST_STEPS):
        if all(task.done() for task in tasks):
            world.loop.close()
            return range(steps + 2)
        world.step()
    raise AssertionError("a scenario of too many steps")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_cancelled_at_every_step(scenario: str) -> None:
    """Each request in turn is cancelled after each possible number of steps; the others end well."""
    requests = SCENARIOS[scenario]
    for victim in range(len(requests)):
        for steps in all_steps(scenario):
            world = World()
            tasks = [world.start(world.encode_and_release(*numbers)) for numbers in requests]
            for _ in range(steps):
                world.step()
            tasks[victim].cancel()
            world.run(asyncio.wait(tasks))
            for index, task in enumerate(tasks):
                if index != victim or not task.cancelled():
                    assert task.exception() is None
            world.finish()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_all_cancelled_at_every_step(scenario: str) -> None:
    """Every request is cancelled in the same moment; nobody is left to clean up but the cache."""
    for steps in all_steps(scenario):
        world = World()
        tasks = [world.start(world.encode_and_release(*numbers)) for numbers in SCENARIOS[scenario]]
        for _ in range(steps):
            world.step()
        for task in tasks:
            task.cancel()
        world.run(asyncio.wait(tasks))
        world.finish()


@pytest.mark.parametrize("call", ["get", "put"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_store_raises(scenario: str, call: str) -> None:
    """An error out of the store's calls fails no request."""
    world = World()

    def explode() -> None:
        raise OSError("broken")

    setattr(world.store, f"on_{call}", explode)
    for numbers in SCENARIOS[scenario]:
        world.run(world.encode_and_release(*numbers))
    world.finish()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_closed_at_every_step(scenario: str) -> None:
    """Requests end well or with CacheClosed, and nothing is held afterwards."""
    for steps in all_steps(scenario):
        world = World()
        tasks = [world.start(world.encode_and_release(*numbers)) for numbers in SCENARIOS[scenario]]
        for _ in range(steps):
            world.step()
        close = world.start(world.cache.close())
        world.run(asyncio.wait(tasks))
        for task in tasks:
            assert task.exception() is None or isinstance(task.exception(), CacheClosed)
        while not close.done():  # it closes the store on a thread of the loop
            world.step()
        world.cache.check_integrity()
        stats = world.cache.stats()
        assert (stats["pins"], stats["filling"], stats["pages_draining"], stats["waiting"]) == (0, 0, 0, 0)
        assert world.store.is_closed
        assert not world.errors
        world.loop.close()


@pytest.mark.parametrize("steps", range(6))
def test_a_fill_whose_copy_fails_gives_the_entry_up(steps: int) -> None:
    """Rows that cannot be read fail the fill, whoever waits takes over, and no page is lost."""
    world = World()
    rows = torch.zeros(3, 8, device="meta")

    async def broken() -> None:
        ticket = (await world.cache.acquire([wanted(2)], claim=True, ask_store=False)).tickets[wanted(2).key]
        await world.cache.fill(ticket, rows)

    failing = world.start(broken())
    for _ in range(steps):
        world.step()
    other = world.start(world.encode_and_release(2))
    world.run(asyncio.wait([failing, other]))
    assert isinstance(failing.exception(), RuntimeError | NotImplementedError | ValueError)
    assert other.exception() is None
    world.finish()
