"""The running application of these tests, which leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.server import Server


@pytest.fixture(scope="package")
def paged_server() -> Iterator[Server]:
    """What the shipped configuration is not: paged KV memory, memory of the host in front of Mooncake."""
    kv = {"kv_cache": "paged", "prefill_chunk_tokens": 32, "prefix_cache": True, "page_size": 8}
    with Server({"kv": kv, "store": {"host_bytes": 32 * 2**20}}) as server:
        yield server
