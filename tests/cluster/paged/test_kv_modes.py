"""The paged KV mode through the service: chunks and reused prefixes change nothing but the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.mixed_items import cases, embed
from tests.cluster.server import Server
from tests.oracle import Oracle, assert_same, cosine

pytestmark = pytest.mark.cluster


def test_chunks_and_prefixes_give_the_plain_vectors(
    paged_server: Server, demo_folder: Path, photo: bytes
) -> None:
    """Long items run in chunks, repeated ones from cached prefixes; the vectors are the plain forward's."""
    oracle = Oracle(demo_folder)
    items = [*cases(photo, seed=20), {"parts": [photo, "a caption that is long enough for chunks " * 8]}]
    expected = [oracle.embed(item) for item in items]
    (before,) = paged_server.stage("embedder")
    first = embed(paged_server, items)
    (chunked,) = paged_server.stage("embedder")
    again = embed(paged_server, items)
    (reused,) = paged_server.stage("embedder")

    for vectors in (first, again):
        for vector, truth in zip(vectors, expected, strict=True):
            assert_same(vector, truth)
            assert cosine(vector, truth) == pytest.approx(1.0, abs=1e-6)
    forwards = chunked["prefill"]["prefill_forwards"] - before["prefill"]["prefill_forwards"]
    assert forwards > chunked["batches"] - before["batches"]  # a batch took several: it ran in chunks
    assert reused["kv"]["decisions"]["cached_prefix"] > chunked["kv"]["decisions"]["cached_prefix"]
    hits = reused["prefill"]["prefix_hit_tokens"] - chunked["prefill"]["prefix_hit_tokens"]
    ran = reused["prefill"]["prefill_tokens"] - chunked["prefill"]["prefill_tokens"]
    ran_first = chunked["prefill"]["prefill_tokens"] - before["prefill"]["prefill_tokens"]
    assert hits > 0
    assert ran < ran_first
