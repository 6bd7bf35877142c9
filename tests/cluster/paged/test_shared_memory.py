"""Rows in shared memory of the host: alone, and in front of Mooncake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.mixed_items import cases, embed
from tests.cluster.server import Server
from tests.oracle import Oracle, assert_same

pytestmark = pytest.mark.cluster

HOST_BYTES = 32 * 2**20


@pytest.fixture(scope="module")
def lone_server() -> Iterator[Server]:
    """Shared memory without Mooncake."""
    with Server({"store": {"host_bytes": HOST_BYTES}}, config="configs/shared-memory.yaml") as server:
        yield server


@pytest.mark.parametrize("served", ["lone_server", "paged_server"])
def test_a_new_embedder_reads_rows_from_the_host(
    served: str, request: pytest.FixtureRequest, demo_folder: Path, photo: bytes
) -> None:
    """What one replica wrote another reads from shared memory, alone or in front of Mooncake."""
    server: Server = request.getfixturevalue(served)
    items = cases(photo, seed=30)
    encodes = server.counter("encoder", "encodes")
    cold = embed(server, items)
    server.kill("embedder")
    again = embed(server, items)
    assert server.counter("embedder", "hits_host") == server.counter("encoder", "encodes") - encodes == 4
    assert server.counter("embedder", "hits_store") == 0
    assert np.array_equal(again, embed(server, items))

    oracle = Oracle(demo_folder)
    for vectors in (cold, again):
        for vector, item in zip(vectors, items, strict=True):
            assert_same(vector, oracle.embed(item))
