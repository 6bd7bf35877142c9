"""Vectors over HTTP against transformers' plain forward: cold, from the pool, and from the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.mixed_items import cases, embed
from tests.cluster.server import Server
from tests.oracle import Oracle, assert_same

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def sharded_server(sharded_folder: Path) -> Iterator[Server]:
    with Server({"model": {"path": str(sharded_folder)}}) as server:
        yield server


@pytest.fixture(params=[("server", "demo"), ("sharded_server", "sharded")], ids=["demo", "sharded"])
def served(request: pytest.FixtureRequest) -> tuple[Server, Oracle]:
    """A server, and the plain forward of what it serves."""
    server, model = request.param
    return request.getfixturevalue(server), Oracle(request.getfixturevalue(f"{model}_folder"))


def test_cold_local_and_store_hits_are_true(served: tuple[Server, Oracle], photo: bytes) -> None:
    """Mixed items have the plain forward's vectors, wherever their rows came from."""
    server, oracle = served
    items = cases(photo, seed=10)
    expected = [oracle.embed(item) for item in items]
    num_pictures = 4

    encodes_before = server.counter("encoder", "encodes")
    cold = embed(server, items)
    assert server.counter("encoder", "encodes") == encodes_before + num_pictures
    local_before = server.counter("embedder", "hits_local")
    local = embed(server, items)
    assert server.counter("embedder", "hits_local") == local_before + num_pictures
    server.kill("embedder")
    stored = embed(server, items)
    assert server.counter("embedder", "hits_store") == num_pictures
    assert server.counter("encoder", "encodes") == encodes_before + num_pictures

    for vectors in (cold, local, stored):
        for vector, truth in zip(vectors, expected, strict=True):
            assert_same(vector, truth)
    assert np.array_equal(local, stored)


def test_each_item_alone_is_true(served: tuple[Server, Oracle], photo: bytes) -> None:
    """Items asked for one by one have the plain forward's vector, cold and from the pool."""
    server, oracle = served
    for item in cases(photo, seed=50):
        truth = oracle.embed(item)
        assert_same(embed(server, [item])[0], truth)
        assert_same(embed(server, [item])[0], truth)
