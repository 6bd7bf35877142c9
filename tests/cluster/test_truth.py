"""Vectors over HTTP against transformers' plain forward: cold, from the pool, and from the store."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.cluster.server import Server
from tests.models.pictures import png
from tests.oracle import Oracle, assert_same

pytestmark = pytest.mark.cluster

Vectors = npt.NDArray[np.float32]


def cases(photo: bytes, seed: int) -> list[dict[str, Any]]:
    """Items of every kind; pictures of different seeds share nothing."""
    return [
        {"parts": ["a red circle on a dark background"]},
        {"parts": [png(100 + seed, 80, seed)]},
        {"parts": [png(150, 90, seed + 1), png(64, 200, seed + 2)]},
        {"parts": ["before\n", png(120, 120, seed + 3), "\nand after"]},
        {"parts": [png(150, 90, seed + 1), "the first picture of another item"]},
        {"parts": ["blue star"], "instruction": "Find the picture that matches"},
    ]


def as_json(item: dict[str, Any]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(part).decode()}"}}
        for part in item["parts"]
    ]
    return {"content": content, "instruction": item.get("instruction")}


def embed(server: Server, items: Sequence[dict[str, Any]]) -> Vectors:
    answer = server.post({"input": [as_json(item) for item in items], "encoding_format": "base64"})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])


@pytest.fixture(scope="module", params=["demo", "sharded"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Oracle]]:
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    with Server({"model": {"path": str(folder)}}) as server:
        yield server, Oracle(folder)


def test_cold_local_and_store_hits_are_true(served: tuple[Server, Oracle], photo: bytes) -> None:
    """Mixed items have the plain forward's vectors, wherever their rows came from."""
    server, oracle = served
    items = cases(photo, seed=10)
    expected = [oracle.embed(item) for item in items]
    num_pictures = 4

    cold = embed(server, items)
    assert server.counter("encoder", "encodes") == num_pictures
    local_before = server.counter("embedder", "hits_local")
    local = embed(server, items)
    assert server.counter("embedder", "hits_local") == local_before + num_pictures
    server.kill("embedder")
    stored = embed(server, items)
    assert server.counter("embedder", "hits_store") == num_pictures
    assert server.counter("encoder", "encodes") == num_pictures

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
