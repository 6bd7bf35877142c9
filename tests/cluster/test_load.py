"""Many at once, and the service changed under load: two replicas of each stage."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.server import Server, wait_until
from tests.cluster.traffic import (
    LONG_TEXT,
    Item,
    Traffic,
    Truth,
    ask,
    ask_all,
    connect,
    pictures,
    run_async,
    settle,
    stages,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NUM_REPLICAS = 2


def deployments(num_encoders: int = NUM_REPLICAS) -> list[dict[str, Any]]:
    """So small a share of a CPU for each that three encoders fit into two cores."""
    share = {"ray_actor_options": {"num_cpus": 0.1}}
    return [
        {"name": "Encoder", "num_replicas": num_encoders, **share},
        {"name": "Embedder", "num_replicas": NUM_REPLICAS, **share},
    ]


@pytest.fixture(scope="module")
def truth(demo_folder: Path) -> Truth:
    return Truth(demo_folder)


@pytest.fixture(scope="module")
def twofold_server() -> Iterator[Server]:
    with Server(deployments=deployments(), start_timeout_s=300) as server:
        await_replicas(server)
        yield server


@pytest.fixture
def server(twofold_server: Server) -> Iterator[Server]:
    """The server, which the test must leave calm and with two replicas of each stage."""
    yield twofold_server
    await_replicas(twofold_server)
    settle(twofold_server)


def pids(server: Server, stage: str) -> set[int]:
    return {replica["pid"] for replica in server.stage(stage)}


def await_replicas(server: Server, num_encoders: int = NUM_REPLICAS, without: Collection[int] = ()) -> None:
    """Waits until so many replicas serve, none of them with a pid of `without`."""

    def are_there() -> bool:
        found = stages(server)
        if found is None or server.get("/health").status_code != 200:
            return False
        now = {replica["pid"] for replica in found["encoder"] + found["embedder"]}
        numbers = (len(found["encoder"]), len(found["embedder"]))
        return numbers == (num_encoders, NUM_REPLICAS) and now.isdisjoint(without)

    wait_until(are_there, 240, f"{num_encoders} encoders and {NUM_REPLICAS} embedders")


def deploy(server: Server, document: dict[str, Any]) -> None:
    """`serve deploy` of a changed config file, as an operator does it."""
    env = server.cluster_env()
    ask_for_dashboard = "import ray; print(ray.init(logging_level='ERROR').dashboard_url)"
    run = subprocess.run([sys.executable, "-c", ask_for_dashboard], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    config = server.config.with_name("changed.yaml")
    config.write_text(yaml.safe_dump(document))
    command = [str(Path(sys.executable).with_name("serve")), "deploy", str(config)]
    address = f"http://{run.stdout.split()[-1]}"
    subprocess.run([*command, "--address", address], env=env, check=True, capture_output=True)


def test_one_picture_from_three_clients_is_encoded_once(server: Server, truth: Truth) -> None:
    """With two encoders, the same picture asked for three times at once costs one encode."""
    (picture,) = pictures(1, seed=20)
    requests = [[(picture, f"client {i}")] for i in range(3)]
    before = server.counter("encoder", "encodes")
    for items, answer in zip(requests, ask_all(server, requests), strict=True):
        truth.check(items, answer)
    assert server.counter("encoder", "encodes") == before + 1


def test_200_requests_at_once_are_all_answered(server: Server, truth: Truth) -> None:
    """Texts, new pictures and repeated ones, 200 at once: 200 answers, every vector true."""
    seen = pictures(20, seed=21)
    kinds: list[list[Item]] = [
        [("a text", f"number {i}") for i in range(200)],
        [(seen[i % 20],) for i in range(200)],
        [(seen[i % 20], f"number {i}") for i in range(200)],
    ]
    requests = [[kinds[i % 3][i]] for i in range(200)]
    for items, answer in zip(requests, ask_all(server, requests), strict=True):
        truth.check(items, answer)


def test_two_item_calls_keep_their_order(server: Server, truth: Truth) -> None:
    """Of 50 calls at once with two items each, every one gets its own two vectors, in order."""
    shown = pictures(10, seed=22)
    requests = [[(f"number {i}",), (shown[i % 10], f"{i}")] for i in range(50)]
    for items, answer in zip(requests, ask_all(server, requests), strict=True):
        truth.check(items, answer)


def test_a_truncated_picture_fails_alone(server: Server, truth: Truth) -> None:
    """Of 8 requests at once with a picture each, one cut off in its pixels, exactly that one is refused."""
    *good, bad = pictures(8, seed=23)
    requests = [[(picture,)] for picture in (*good, bad[: len(bad) // 2])]
    *answers, refused = ask_all(server, requests)
    for items, answer in zip(requests[:-1], answers, strict=True):
        truth.check(items, answer)
    assert refused.status == 400
    assert "input[0].content[0]" in refused.text


def test_clients_that_leave_free_their_work(server: Server) -> None:
    """Of 128 long requests whose clients leave, most are never computed, and the queues empty."""
    requests = [[(f"{LONG_TEXT} {i}",)] for i in range(128)]
    before = server.counter("embedder", "embeds")

    async def leave() -> None:
        async with connect(server) as client:
            tasks = [asyncio.create_task(ask(client, items)) for items in requests]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run_async(leave())
    settle(server)
    assert server.counter("embedder", "embeds") - before < len(requests) / 2


@pytest.mark.parametrize("stage", ["encoder", "embedder"])
def test_a_replica_that_is_killed_fails_no_request(server: Server, truth: Truth, stage: str) -> None:
    """kill -9 of one of two replicas amid requests for new pictures: all are answered, and true."""
    requests = [[(picture, stage)] for picture in pictures(300, seed=24)]
    with Traffic(server, requests, concurrency=4) as traffic:
        traffic.await_answers(20)
        victim = min(pids(server, stage))
        os.kill(victim, signal.SIGKILL)
        traffic.await_answers(40)
        await_replicas(server, without={victim})
        traffic.await_answers(20)
    traffic.check(truth)


def test_scaling_and_a_changed_setting_fail_no_request(server: Server, truth: Truth) -> None:
    """Amid requests encoders go from two to one, to three, to one; then a changed setting replaces every
    replica by two of each. All requests are answered, and true.
    """
    requests = [[(picture, "scaling")] for picture in pictures(60, seed=25)]
    document = copy.deepcopy(server.document)
    (application,) = document["applications"]
    with Traffic(server, requests, concurrency=2) as traffic:
        for num_encoders in (1, 3, 1):
            application["deployments"] = deployments(num_encoders)
            deploy(server, document)
            await_replicas(server, num_encoders)
            traffic.await_answers(20)
        old = pids(server, "encoder") | pids(server, "embedder")
        application["deployments"] = deployments()
        application["args"]["embedder"] = {"max_batch_items": 100}
        deploy(server, document)
        await_replicas(server, without=old)
        traffic.await_answers(20)
    traffic.check(truth)
