"""Rows in shared memory of the host: alone, and in front of Mooncake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.server import Server
from tests.cluster.test_truth import cases, embed
from tests.oracle import Oracle, assert_same

pytestmark = pytest.mark.cluster

HOST_BYTES = 32 * 2**20


@pytest.mark.parametrize("config", ["configs/shared-memory.yaml", "configs/epd.yaml"])
def test_a_new_embedder_reads_rows_from_the_host(config: str, demo_folder: Path, photo: bytes) -> None:
    """What one replica wrote another reads from shared memory, alone or in front of Mooncake."""
    items = cases(photo, seed=30)
    with Server({"store": {"host_bytes": HOST_BYTES}}, config=config) as server:
        cold = embed(server, items)
        server.kill("embedder")
        again = embed(server, items)
        assert server.counter("embedder", "hits_host") == server.counter("encoder", "encodes") == 4
        assert server.counter("embedder", "hits_store") == 0
        assert np.array_equal(again, embed(server, items))

    oracle = Oracle(demo_folder)
    for vectors in (cold, again):
        for vector, item in zip(vectors, items, strict=True):
            assert_same(vector, oracle.embed(item))
