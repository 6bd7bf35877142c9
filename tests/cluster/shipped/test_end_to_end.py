"""The main job on real parts: HTTP in, two stages, a real Mooncake Store, vectors out."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.server import Server
from tests.oracle import Oracle, assert_same

pytestmark = pytest.mark.cluster


def vector(server: Server, photo: bytes) -> np.ndarray:
    image = f"data:image/jpeg;base64,{base64.b64encode(photo).decode()}"
    answer = server.post({"input": [{"image": image}]})
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"], np.float32)


def counters(server: Server) -> dict[str, int]:
    names = {"encoder": ("encodes", "put_keys"), "embedder": ("hits_store", "hits_local")}
    return {name: server.counter(stage, name) for stage, group in names.items() for name in group}


def test_rows_outlive_the_replicas_that_made_and_read_them(
    server: Server, demo_folder: Path, photo: bytes
) -> None:
    """A picture is encoded once, also when both replicas are killed and new ones answer."""
    before = counters(server)
    first, second = vector(server, photo), vector(server, photo)
    assert np.array_equal(first, second)
    assert_same(first, Oracle(demo_folder).embed({"parts": [photo], "instruction": None}))
    grown = {name: value - before[name] for name, value in counters(server).items()}
    assert grown == {"encodes": 1, "put_keys": 1, "hits_store": 1, "hits_local": 1}

    server.kill("encoder", "embedder")
    gets_before = server.master_metric("master_batch_get_replica_list_items_total")
    third = vector(server, photo)
    assert np.array_equal(first, third)
    assert counters(server) == {"encodes": 0, "put_keys": 0, "hits_store": 1, "hits_local": 0}
    assert server.master_metric("master_batch_get_replica_list_items_total") == gets_before + 1
