"""The cache in real processes: a pool of six pictures, a store that dies, clients that leave."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from epd.cache.entry import HEADER_BYTES
from epd.deployments.settings import ModelSettings, StageSettings
from epd.deployments.stage import open_model
from tests.cluster.server import Server, wait_until
from tests.cluster.traffic import Traffic, Truth, ask, ask_all, connect, pictures, run_async, settle

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POOL_PICTURES = 6
PAGE_TOKENS = StageSettings().page_tokens


@pytest.fixture(scope="module")
def truth(demo_folder: Path) -> Truth:
    return Truth(demo_folder)


@pytest.fixture(scope="module")
def small_server() -> Iterator[Server]:
    """One replica of each stage, each with a pool of six pages, a picture of these tests being one page."""
    layout = open_model(ModelSettings(device="cpu")).row_layout
    assert layout is not None
    stage = {"pool_bytes": POOL_PICTURES * (PAGE_TOKENS * layout.row_bytes + HEADER_BYTES)}
    with Server({"encoder": stage, "embedder": stage}) as server:
        yield server


@pytest.fixture
def server(small_server: Server) -> Iterator[Server]:
    """The server, which the test must leave calm."""
    yield small_server
    settle(small_server)


def counted(server: Server, *names: tuple[str, str]) -> Callable[[], tuple[int, ...]]:
    """By how much these counters, each a stage's, grew since this call."""
    before = [server.counter(*name) for name in names]
    return lambda: tuple(server.counter(*name) - old for name, old in zip(names, before, strict=True))


def embed(server: Server, truth: Truth, *parts: str | bytes) -> np.ndarray:
    """The checked vector of one item."""
    (answer,) = ask_all(server, [[parts]])
    truth.check([parts], answer)
    return answer.vectors[0]


def test_one_item_draws_on_every_tier(server: Server, truth: Truth) -> None:
    """An item of a local hit, a store hit, an evicted picture and a new one encodes the new one alone."""
    local, stored, evicted, new, *others = pictures(4 + POOL_PICTURES, seed=1)
    embed(server, truth, stored)
    server.kill("embedder")
    for picture in (evicted, *others, local):
        embed(server, truth, picture)
    grown = counted(server, ("encoder", "encodes"), ("embedder", "hits_store"))
    local_hits = counted(server, ("embedder", "hits_local"))
    embed(server, truth, local, "between", stored, evicted, new)
    assert grown() == (1, 3)
    assert local_hits() >= (1,)


def test_a_picture_twice_in_an_item_is_encoded_once(server: Server, truth: Truth) -> None:
    """The same picture twice in one item costs one encode and one read, and has two places in the prompt."""
    (picture,) = pictures(1, seed=2)
    grown = counted(server, ("encoder", "encodes"), ("embedder", "hits_store"))
    twice = embed(server, truth, picture, picture)
    assert grown() == (1, 1)
    assert not np.allclose(twice, embed(server, truth, picture), atol=1e-3)


def test_swapped_pictures_have_another_vector(server: Server, truth: Truth) -> None:
    """Two adjacent pictures and their swap are told apart, with the same two encodes."""
    one, other = pictures(2, seed=3)
    grown = counted(server, ("encoder", "encodes"))
    first, swapped = embed(server, truth, one, other), embed(server, truth, other, one)
    assert grown() == (2,)
    assert not np.allclose(first, swapped, atol=1e-3)


def test_more_pictures_than_pages_are_each_encoded_once(server: Server, truth: Truth) -> None:
    """64 requests at once over 8 pictures, with room for 6, are all true and encode each picture once; again
    only what the encoder could not leave in the store.
    """
    wanted = pictures(8, seed=4)
    requests = [[(wanted[i % len(wanted)],)] for i in range(64)]
    grown = counted(server, ("encoder", "encodes"))
    unstored = counted(server, *(("encoder", name) for name in ("put_timeouts", "put_failures")))
    for items, answer in zip(requests, ask_all(server, requests), strict=True):
        truth.check(items, answer)
    (encodes,) = grown()
    assert len(wanted) <= encodes <= len(wanted) + sum(unstored()), server.stage("encoder")


def test_an_item_of_more_pictures_than_the_pool_holds_is_refused(server: Server) -> None:
    """An item that no pool can hold is the caller's mistake, told at once."""
    (answer,) = ask_all(server, [[tuple(pictures(POOL_PICTURES + 1, seed=5))]])
    assert answer.status == 400, answer.text
    assert "input[0]" in answer.text


def test_clients_that_leave_take_their_pins_along(server: Server, truth: Truth) -> None:
    """Of 200 requests in flight half are cut off: the others are true, and nothing stays pinned."""
    requests = [[(picture, f"request {i}")] for i, picture in enumerate(pictures(40, seed=6) * 5)]

    async def run() -> list[object]:
        async with connect(server) as client:
            tasks = [asyncio.create_task(ask(client, items)) for items in requests]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks[::2]:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    outcomes = run_async(run())
    assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) > 50
    for items, outcome in list(zip(requests, outcomes, strict=True))[1::2]:
        truth.check(items, outcome)  # type: ignore[arg-type]
    settle(server)


@pytest.mark.parametrize("process", ["master", "owner"])
def test_the_stores_death_fails_no_request(server: Server, truth: Truth, process: str) -> None:
    """The store's master, or the owner of its memory, is killed amid requests: all are true; hits resume."""
    requests = [[(picture, process)] for picture in pictures(2 * POOL_PICTURES, seed=7)]

    def killed() -> int:
        pid: int = server.stage("store")[0][f"{process}_pid"]
        os.kill(pid, signal.SIGKILL)
        return pid

    with Traffic(server, requests, concurrency=8) as traffic:
        traffic.await_answers(2 * len(requests))
        pid = killed()
        traffic.await_answers(2 * len(requests))
        wait_until(lambda: server.stage("store")[0][f"{process}_pid"] not in (None, pid), 30, "its restart")
        grown = counted(server, ("embedder", "hits_store"))
        wait_until(lambda: grown()[0] >= len(requests), 60, "hits in the store")
        traffic.await_answers(len(requests))
    traffic.check(truth)


def test_requests_right_after_the_masters_death_are_answered(server: Server, truth: Truth) -> None:
    """The master is killed while nobody asks: what is asked next is true, known pictures and new ones."""
    known, new = pictures(2, seed=8)
    embed(server, truth, known)
    for picture in pictures(POOL_PICTURES, seed=9):
        embed(server, truth, picture)
    os.kill(server.stage("store")[0]["master_pid"], signal.SIGKILL)
    for answer, picture in zip(ask_all(server, [[(known,)], [(new,)]]), (known, new), strict=True):
        truth.check([(picture,)], answer)


def test_a_store_that_hangs_holds_up_no_answer(server: Server, truth: Truth) -> None:
    """While the master hangs, a new picture's rows go to the embedder directly, after the grace of a put."""
    (picture,) = pictures(1, seed=7_000)
    body = {"input": [{"image": base64.b64encode(picture).decode()}]}
    (store,) = server.stage("store")
    os.kill(store["master_pid"], signal.SIGSTOP)
    try:
        answer = httpx.post(
            f"{server.url}/v1/embeddings", json=body, headers={"X-EPD-Timing": "1"}, timeout=30
        )
    finally:
        os.kill(store["master_pid"], signal.SIGCONT)
    assert answer.status_code == 200, answer.text
    steps = dict(step.split(";dur=") for step in answer.headers["X-EPD-Timing"].split(", "))
    assert float(steps["encoder_publish"]) < 1000  # a put gives up after 2,000 ms
    vector = np.array(answer.json()["data"][0]["embedding"], np.float32)
    assert np.array_equal(vector, embed(server, truth, picture))
