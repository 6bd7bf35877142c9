"""One running application for all tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.server import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The shipped configuration: demo checkpoint, managed Mooncake. Share it; do not break it."""
    with Server() as server:
        yield server
