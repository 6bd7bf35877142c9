"""The circuit breaker and the store behind it."""

from __future__ import annotations

import pytest

from epd.cache.breaker import BreakerState, CircuitBreaker
from epd.cache.stores.base import GetResult, PutResult
from epd.cache.stores.guarded import GuardedStore
from tests.cache.fakes import FakeStore


class FakeClock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_breaker(clock: FakeClock) -> CircuitBreaker:
    return CircuitBreaker(max_failures=2, timeout_s=1.0, probe_s=5.0, clock=clock)


def state_of(breaker: CircuitBreaker) -> BreakerState:
    return breaker.state


def fail(breaker: CircuitBreaker) -> None:
    call = breaker.admit()
    assert call is not None
    breaker.report(call, failed=True)


def test_it_opens_after_failures_in_a_row() -> None:
    """A success in between starts the count again."""
    breaker = make_breaker(FakeClock())
    fail(breaker)
    call = breaker.admit()
    assert call is not None
    breaker.report(call, failed=False)
    fail(breaker)
    assert state_of(breaker) is BreakerState.CLOSED
    fail(breaker)
    assert state_of(breaker) is BreakerState.OPEN
    assert breaker.admit() is None


def test_one_probe_closes_it_or_opens_it_anew() -> None:
    """After the pause one call is let through, and its end decides."""
    clock = FakeClock()
    breaker = make_breaker(clock)
    fail(breaker)
    fail(breaker)
    clock.now += 5.0
    probe = breaker.admit()
    assert probe is not None
    assert state_of(breaker) is BreakerState.HALF_OPEN
    assert breaker.admit() is None
    breaker.report(probe, failed=True)
    assert state_of(breaker) is BreakerState.OPEN
    assert breaker.admit() is None
    clock.now += 5.0
    probe = breaker.admit()
    assert probe is not None
    breaker.report(probe, failed=False)
    assert state_of(breaker) is BreakerState.CLOSED


def test_a_slow_call_is_a_failed_one() -> None:
    """Success after the deadline counts as failure."""
    clock = FakeClock()
    breaker = make_breaker(clock)
    for _ in range(2):
        call = breaker.admit()
        assert call is not None
        clock.now += 1.5
        breaker.report(call, failed=False)
    assert state_of(breaker) is BreakerState.OPEN


def test_a_call_that_hangs_keeps_it_open_and_its_end_lets_a_probe_through() -> None:
    """While a call is overdue nothing passes, however long; afterwards it recovers as ever."""
    clock = FakeClock()
    breaker = make_breaker(clock)
    hung = breaker.admit()
    assert hung is not None
    clock.now += 1000.0
    assert state_of(breaker) is BreakerState.OPEN
    assert breaker.admit() is None
    breaker.report(hung, failed=False)
    assert breaker.admit() is None
    clock.now += 5.0
    assert breaker.admit() is not None


def test_an_older_call_that_ends_does_not_end_the_probe() -> None:
    """Only the probe's own end lets another one through."""
    clock = FakeClock()
    breaker = make_breaker(clock)
    older = breaker.admit()
    fail(breaker)
    fail(breaker)
    assert older is not None
    breaker.report(older, failed=True)
    clock.now += 5.0
    second_older = breaker.admit()
    assert second_older is not None
    assert breaker.admit() is None


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def test_a_guarded_store_is_not_asked_while_the_breaker_is_open(clock: FakeClock) -> None:
    """Keys are SKIPPED and the store hears nothing, until a probe finds it well."""
    store = FakeStore()
    guarded = GuardedStore(store, make_breaker(clock))
    store.is_failing = True
    assert guarded.get_into(["a"], [[]]) == [GetResult.FAILED]
    assert guarded.put_from(["a"], [[]]) == [PutResult.FAILED]
    assert guarded.get_into(["a", "b"], [[], []]) == [GetResult.SKIPPED, GetResult.SKIPPED]
    assert guarded.put_from(["a"], [[]]) == [PutResult.SKIPPED]
    assert guarded.exists(["a"]) == [False]
    guarded.remove(["a"])
    assert (len(store.get_calls), len(store.put_calls), store.removed) == (1, 1, [])
    assert guarded.stats()["breaker_state"] == BreakerState.OPEN
    store.is_failing = False
    clock.now += 5.0
    assert guarded.get_into(["a"], [[]]) == [GetResult.ABSENT]
    assert guarded.stats()["breaker_state"] == BreakerState.CLOSED


def test_a_store_that_raises_counts_as_failed(clock: FakeClock) -> None:
    """The error passes, and the breaker hears of it."""
    store = FakeStore()

    def explode() -> None:
        raise OSError("broken")

    store.on_get = explode
    guarded = GuardedStore(store, make_breaker(clock))
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            guarded.get_into(["a"], [[]])
    assert guarded.get_into(["a"], [[]]) == [GetResult.SKIPPED]
