"""Stages that scale by the tokens that wait, encoders down to none; a request followed through the logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.server import Server, wait_until
from tests.cluster.traffic import Traffic, Truth, ask_all, body, pictures, stages

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

SCALE_S = 180.0


def scaled(name: str, least: int) -> dict[str, Any]:
    """A deployment of `least` to two replicas that follows what waits within seconds; JSON logs."""
    policy = "epd.deployments.autoscaling:TokenBacklogPolicy"
    return {
        "name": name,
        "logging_config": {"encoding": "JSON"},
        "ray_actor_options": {"num_cpus": 0.1},
        "autoscaling_config": {
            "min_replicas": least,
            "initial_replicas": 1,
            "max_replicas": 2,
            "metrics_interval_s": 0.5,
            "look_back_period_s": 2,
            "upscale_delay_s": 0,
            "downscale_delay_s": 15,
            "downscale_to_zero_delay_s": 3,
            "policy": {"policy_function": policy, "policy_kwargs": {"target_tokens": 30}},
        },
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    deployments = [
        {"name": "Ingress", "logging_config": {"encoding": "JSON"}},
        scaled("Encoder", least=0),
        scaled("Embedder", least=1),
    ]
    with Server(deployments=deployments, start_timeout_s=300) as server:
        yield server


def await_counts(server: Server, encoders: int, embedders: int) -> None:
    def reached() -> bool:
        found = stages(server)
        return found is not None and (len(found["encoder"]), len(found["embedder"])) == (encoders, embedders)

    wait_until(reached, SCALE_S, f"{encoders} encoders and {embedders} embedders")


def test_stages_follow_the_tokens_that_wait(server: Server, demo_folder: Path) -> None:
    """Under load two of each, every answer true; in calm no encoder, which is well; one again on demand."""
    truth = Truth(demo_folder)
    requests = [[(picture, f"request {i}")] for i, picture in enumerate(pictures(4000, seed=1))]
    with Traffic(server, requests, concurrency=24) as traffic:
        await_counts(server, 2, 2)
    assert {answer.status for _, answer in traffic.answers} == {200}
    for items, answer in traffic.answers[:: len(traffic.answers) // 50 + 1]:
        truth.check(items, answer)
    await_counts(server, 0, 1)
    health = server.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert server.stage("encoder") == []
    (picture,) = pictures(1, seed=2)
    (answer,) = ask_all(server, [[(picture,)]])
    truth.check([(picture,)], answer)
    assert len(server.stage("encoder")) == 1


def test_a_request_s_id_is_in_the_logs_of_every_stage(server: Server) -> None:
    """The client's X-Request-ID comes back, and finds the request in the JSON logs of all three."""
    (picture,) = pictures(1, seed=3)
    headers = {"X-Request-ID": "follow-this-one"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body([(picture,)]), headers=headers, timeout=120)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "follow-this-one")

    def seen() -> set[str]:
        lines = [line for line in server.serve_log_lines() if "follow-this-one" in line]
        records = [json.loads(line) for line in lines if line.startswith("{")]  # the proxy's are plain
        return {record["deployment"] for record in records if record["request_id"] == "follow-this-one"}

    wait_until(
        lambda: seen() == {"epd_Ingress", "epd_Encoder", "epd_Embedder"}, 30, "a log record of each stage"
    )
