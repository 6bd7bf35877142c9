"""The running application of these tests, which leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.server import Server


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    """The demo checkpoint and a managed Mooncake; Ctrl-C leaves no process."""
    with Server() as server:
        yield server
        assert server.stop() == 0
        assert server.pids() == []
