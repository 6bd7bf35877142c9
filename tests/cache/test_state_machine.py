"""Everything that can happen to a cache, in any order, with threads and time in the test's hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from epd.cache.controller import EmbeddingCache
from epd.cache.errors import CacheClosed, PoolBusy
from epd.cache.handles import Acquired, FillTicket, Handle
from epd.cache.pool import PagePool
from tests.cache.fake_loop import FakeRunner, FakeTimeLoop
from tests.cache.fakes import FakeStore
from tests.cache.tools import LAYOUT, PAGE_TOKENS, rows_of, wanted

NUMBERS = st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True)
INDEX = st.integers(0, 50)
TIMEOUT_S, POOL_TIMEOUT_S = 2.0, 30.0
NUM_PAGES = 6  # a request of three needs three to six


@dataclass
class Held:
    """What the callers hold."""

    requests: list[asyncio.Task[Acquired]] = field(default_factory=list)
    fills: list[asyncio.Task[Handle]] = field(default_factory=list)
    publishes: list[asyncio.Task[object]] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    tickets: list[FillTicket] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Callers that acquire, fill, publish, release, abandon, cancel and lose; a store that stalls and fails.

    After each step pages and pins add up, and every live handle's rows are its own. At the end everybody lets
    go, and every page is free or of an idle entry, every wait over.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = FakeTimeLoop()
        self.store = FakeStore()
        self.runners: list[FakeRunner] = []
        self.held = Held()
        self.errors: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))

        def make_runner(name: str, *, num_threads: int, max_queued: int) -> FakeRunner:
            self.runners.append(FakeRunner(name, num_threads=num_threads, max_queued=max_queued))
            return self.runners[-1]

        self.cache = EmbeddingCache(
            PagePool(LAYOUT, PAGE_TOKENS, NUM_PAGES, pin=False),
            self.store,
            timeout_s=TIMEOUT_S,
            pool_timeout_s=POOL_TIMEOUT_S,
            max_queued_gets=3,
            max_queued_puts=2,
            inline_copy_bytes=0,
            make_runner=make_runner,
        )

    @rule(numbers=NUMBERS, claim=st.booleans(), ask_store=st.booleans())
    def acquire(self, numbers: list[int], claim: bool, ask_store: bool) -> None:
        items = [wanted(number, 2 + number % 3) for number in numbers]
        request = self.cache.acquire(items, claim=claim, ask_store=ask_store)
        self.held.requests.append(self.loop.create_task(request))

    @precondition(lambda self: self.held.tickets)
    @rule(index=INDEX)
    def fill(self, index: int) -> None:
        ticket = self.held.tickets.pop(index % len(self.held.tickets))
        self.held.fills.append(self.loop.create_task(self.fill_or_abandon(ticket)))

    async def fill_or_abandon(self, ticket: FillTicket) -> Handle:
        try:
            return await self.cache.fill(ticket, rows_of(ticket.wanted))
        finally:
            self.cache.abandon([ticket])

    @precondition(lambda self: self.held.tickets)
    @rule(index=INDEX, is_lost=st.booleans())
    def abandon(self, index: int, is_lost: bool) -> None:
        ticket = self.held.tickets.pop(index % len(self.held.tickets))
        if not is_lost:
            self.on_loop(self.cache.abandon, [ticket])

    @precondition(lambda self: self.held.handles)
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        self.on_loop(self.cache.release, [self.held.handles.pop(index % len(self.held.handles))])

    @precondition(lambda self: self.held.handles)
    @rule(index=INDEX, count=st.integers(1, 3))
    def publish(self, index: int, count: int) -> None:
        handles = [self.held.handles[(index + i) % len(self.held.handles)] for i in range(count)]
        self.held.publishes.append(self.loop.create_task(self.publish_only(handles)))

    async def publish_only(self, handles: list[Handle]) -> None:
        await self.cache.publish(handles)

    @rule(index=INDEX, kind=st.sampled_from(["requests", "fills", "publishes"]))
    def cancel(self, index: int, kind: str) -> None:
        self.cancel_one(index, getattr(self.held, kind))

    @rule(index=st.integers(0, 2))
    def begin_call(self, index: int) -> None:
        self.runners[index].begin()

    @rule(index=st.integers(0, 2), which=INDEX)
    def end_call(self, index: int, which: int) -> None:
        self.runners[index].end(which)

    @rule(index=st.integers(0, 2), which=INDEX, times=st.integers(0, 9), victims=st.sets(INDEX, max_size=3))
    def end_call_and_cancel(self, index: int, which: int, times: int, victims: set[int]) -> None:
        """Requests are cancelled while what they wait for is on its way to them."""
        self.runners[index].begin()
        self.runners[index].end(which)
        self.loop.step(times)
        for victim in victims:
            self.cancel_one(victim, self.held.requests)

    @precondition(lambda self: self.held.handles)
    @rule(index=INDEX, times=st.integers(0, 5), victim=INDEX)
    def release_and_cancel(self, index: int, times: int, victim: int) -> None:
        """A request in line is cancelled while it is being served."""
        self.release(index)
        self.loop.step(times)
        self.cancel_one(victim, self.held.requests)

    @precondition(lambda self: self.held.tickets)
    @rule(index=INDEX, victims=st.sets(INDEX, max_size=3))
    def cancel_and_abandon(self, index: int, victims: set[int]) -> None:
        """A fill is given up by who has just cancelled some that wait for it."""
        ticket = self.held.tickets.pop(index % len(self.held.tickets))

        def both(tickets: list[FillTicket]) -> None:
            for victim in victims:
                self.cancel_one(victim, self.held.requests)
            self.cache.abandon(tickets)

        self.on_loop(both, [ticket])

    def cancel_one(self, index: int, tasks: list[asyncio.Task[Any]]) -> None:
        if tasks:
            tasks[index % len(tasks)].cancel()

    @rule(times=st.integers(1, 12))
    def run_loop(self, times: int) -> None:
        self.loop.step(times)

    @rule(seconds=st.sampled_from([0.5, TIMEOUT_S + 0.1, POOL_TIMEOUT_S + 0.1]))
    def pass_time(self, seconds: float) -> None:
        self.loop.advance(seconds)

    @rule(is_failing=st.booleans())
    def change_store(self, is_failing: bool) -> None:
        self.store.is_failing = is_failing

    @rule(number=st.integers(0, 7))
    def damage_object(self, number: int) -> None:
        key = str(wanted(number).key)
        if key in self.store.objects:
            self.store.objects[key] = self.store.objects[key][:-1] + b"?"

    @rule()
    def collect(self) -> None:
        """Takes the results of tasks that have ended."""
        held = self.held
        for request in [task for task in held.requests if task.done()]:
            held.requests.remove(request)
            if not request.cancelled() and not isinstance(request.exception(), PoolBusy | CacheClosed):
                acquired = request.result()
                held.handles += acquired.handles.values()
                held.tickets += acquired.tickets.values()
        for fill in [task for task in held.fills if task.done()]:
            held.fills.remove(fill)
            if not fill.cancelled() and not isinstance(fill.exception(), ValueError | CacheClosed):
                held.handles.append(fill.result())
        for publish in [task for task in held.publishes if task.done()]:
            held.publishes.remove(publish)
            assert publish.cancelled() or publish.exception() is None

    @invariant()
    def adds_up(self) -> None:
        assert not self.errors
        self.cache.check_integrity()
        for handle in self.held.handles:
            rows = self.cache.pool.copy_rows(handle.runs, handle.num_tokens)
            assert torch.equal(rows, rows_of(handle.wanted)), f"{handle.key} has others' rows"

    def on_loop(self, call: Callable[[Any], None], argument: Any) -> None:
        async def run() -> None:
            call(argument)

        self.loop.run_until_complete(run())

    def end_calls(self) -> None:
        for runner in self.runners:
            while runner.queued or runner.running:
                runner.begin()
                runner.end()
        self.loop.step()

    def teardown(self) -> None:
        try:
            self.let_go()
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.step()
            self.loop.close()

    def let_go(self) -> None:
        """Everybody lets go, every call ends: nothing may be left, and the whole pool can be had."""
        held = self.held
        for _ in range(100):
            self.collect()
            self.on_loop(self.cache.release, held.handles)
            self.on_loop(self.cache.abandon, held.tickets)
            held.handles, held.tickets = [], []
            self.end_calls()
            if not (held.requests or held.fills or held.publishes):
                break
        assert [held.requests, held.fills, held.publishes] == [[], [], []], "a wait that never ends"
        self.loop.step()
        self.cache.check_integrity()
        stats = self.cache.stats()
        assert (stats["pins"], stats["filling"], stats["pages_draining"], stats["waiting"]) == (0, 0, 0, 0)
        items = [wanted(number + 100, 2) for number in range(NUM_PAGES)]
        everything = self.loop.create_task(self.cache.acquire(items, claim=True, ask_store=False))
        self.loop.step()
        self.on_loop(self.cache.abandon, everything.result().tickets.values())
        assert self.cache.stats()["pages_free"] == NUM_PAGES
        close = self.loop.create_task(self.cache.close())
        while not close.done():  # it closes the store on a thread of the loop
            self.loop.step(1)
        assert not self.errors


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.long
def test_many_more_histories() -> None:
    """The same machine, for much longer."""
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=3000, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
