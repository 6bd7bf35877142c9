"""The main job on real parts: HTTP in, two stages, a real Mooncake Store, vectors out."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.server import Server, wait_until
from tests.oracle import Oracle

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def image_body(photo: bytes) -> dict[str, object]:
    return {"input": [{"image": f"data:image/jpeg;base64,{base64.b64encode(photo).decode()}"}]}


def vector(server: Server, body: dict[str, object]) -> np.ndarray:
    answer = server.post(body)
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"], np.float32)


def kill_replicas(server: Server, *stages: str) -> None:
    """SIGKILL to every replica of the stages; returns when all stages can serve again with new processes."""
    old = {replica["pid"] for stage in stages for replica in server.stage(stage)}
    for pid in old:
        os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        if server.get("/health").status_code != 200:
            return False
        now = [[replica["pid"] for replica in server.stage(stage)] for stage in stages]
        return all(pids and not old & set(pids) for pids in now)

    wait_until(replaced, 90, f"new replicas of {', '.join(stages)}")


def test_rows_outlive_the_replicas_that_made_and_read_them(demo_folder: Path, photo: bytes) -> None:
    """A picture is encoded once, also when both replicas are killed and new ones answer."""
    with Server() as server:
        first = vector(server, image_body(photo))
        second = vector(server, image_body(photo))
        expected = Oracle(demo_folder).embed({"parts": [photo], "instruction": None})
        assert np.array_equal(first, second)
        assert float(first @ expected) >= 0.99999
        assert float(np.abs(first - expected).max()) <= 1e-5
        (encoder,), (embedder,) = server.stage("encoder"), server.stage("embedder")
        assert (encoder["encodes"], encoder["cache"]["put_keys"]) == (1, 1)
        assert (embedder["cache"]["hits_store"], embedder["cache"]["hits_local"]) == (1, 1)

        kill_replicas(server, "encoder", "embedder")
        gets_before = server.master_metric("master_batch_get_replica_list_items_total")
        third = vector(server, image_body(photo))
        assert np.array_equal(first, third)
        (encoder,), (embedder,) = server.stage("encoder"), server.stage("embedder")
        assert (encoder["encodes"], encoder["cache"]["put_keys"]) == (0, 0)
        assert embedder["cache"]["hits_store"] == 1
        assert server.master_metric("master_batch_get_replica_list_items_total") == gets_before + 1

        assert server.stop() == 0
        assert server.pids() == []
