"""More than the queues take, and an end amid requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.cluster.server import Server
from tests.cluster.traffic import (
    LONG_TEXT,
    Answer,
    Item,
    Truth,
    ask,
    ask_all,
    connect,
    pictures,
    run_async,
    settle,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_flood_is_turned_away_and_leaves_no_trace(demo_folder: Path) -> None:
    """Beyond the queue's bound requests get 429 or 503 with Retry-After; a calm one is then answered at once.

    The others are answered; Ctrl-C then lets what is in flight end.
    """
    truth = Truth(demo_folder)
    limits = {"max_tokens_per_item": 4096, "max_tokens_per_request": 4096}
    stage = {"max_batch_items": 1, "max_queued_tokens": 16384}
    requests = [[(f"{LONG_TEXT} {i}",)] for i in range(64)]
    calm = [("a calm request", pictures(1, seed=27)[0])]
    with Server(
        {"limits": limits, "encoder": stage, "embedder": stage},
        start_timeout_s=300,
        program=(sys.executable, "-m", "epd.deployments.run"),
    ) as server:
        answers = ask_all(server, requests)
        (first,) = ask_all(server, [calm])
        truth.check(calm, first)
        turned_away = [answer for answer in answers if answer.status in (429, 503)]
        assert turned_away
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in turned_away)
        served = [
            (items, answer) for items, answer in zip(requests, answers, strict=True) if answer.status == 200
        ]
        assert len(served) + len(turned_away) == len(requests), {answer.status for answer in answers}
        assert served
        for items, answer in served:
            truth.check(items, answer)
        settle(server)

        run_async(interrupted(server, truth))
        assert server.stop() == 0
        assert server.pids() == []


async def interrupted(server: Server, truth: Truth) -> None:
    """Ctrl-C amid six clients' requests for new pictures, which need both stages: each is answered, or turned
    away with a 503.
    """
    shown = iter(pictures(600, seed=28))
    ended: list[tuple[Sequence[Item], Answer]] = []
    is_ending = False

    async def send(client: httpx.AsyncClient) -> None:
        while not is_ending:
            items = [(next(shown), LONG_TEXT)]
            ended.append((items, await ask(client, items)))

    async with connect(server) as client:
        tasks = [asyncio.create_task(send(client)) for _ in range(6)]
        while len(ended) < 6:
            await asyncio.wait(tasks, timeout=0.05)
        num_before = len(ended)
        server.interrupt()
        is_ending = True
        await asyncio.gather(*tasks)
    assert len(ended) > num_before
    for items, answer in ended:
        if answer.status != 503:
            truth.check(items, answer)
