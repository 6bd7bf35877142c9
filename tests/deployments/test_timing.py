"""Where a request's time goes."""

from __future__ import annotations

import asyncio

import pytest

from epd.deployments.timing import Timings, merge, server_timing


async def test_steps_of_a_request_are_collected_across_its_tasks() -> None:
    """Tasks that a request starts add to its record; parallel steps of one name count by the longest."""
    seen: list[tuple[str, float]] = []
    timings = Timings(lambda step, seconds: seen.append((step, seconds)))

    async def work(seconds: float) -> None:
        timings.record("decode", seconds)

    with timings.collect() as collected:
        await asyncio.gather(work(0.1), work(0.3), work(0.2))
        merge({"prefill": 0.5}, "embedder.")
    assert collected == {"decode": 0.3, "embedder.prefill": 0.5}
    assert sorted(seen) == [("decode", 0.1), ("decode", 0.2), ("decode", 0.3)]


async def test_requests_do_not_see_each_others_steps() -> None:
    """Two requests at once have a record each; outside of one nothing is collected."""
    timings = Timings()
    timings.record("decode", 9.0)

    async def request(seconds: float) -> dict[str, float]:
        with timings.collect() as collected:
            await asyncio.sleep(0)
            timings.record("decode", seconds)
            return collected

    first, second = await asyncio.gather(request(0.1), request(0.2))
    assert (first, second) == ({"decode": 0.1}, {"decode": 0.2})


def test_a_step_that_fails_is_recorded_too() -> None:
    """`step` records what it encloses, however it ends."""
    timings = Timings()
    with timings.collect() as collected, pytest.raises(KeyError), timings.step("fetch"):
        raise KeyError
    assert collected["fetch"] >= 0


def test_the_header_has_the_form_of_server_timing() -> None:
    """Milliseconds by step, as Server-Timing spells it."""
    assert server_timing({"total": 0.0123, "embedder.prefill": 0.5}) == (
        "total;dur=12.30, embedder_prefill;dur=500.00"
    )
