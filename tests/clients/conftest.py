"""A running service for other people's clients: one of its own, or one that is named in the environment."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import uvicorn

from epd.deployments.http import make_app
from tests.deployments.fake_application import FakeApplication


@dataclass(frozen=True)
class Service:
    """`url`: without `/v1`. `model`: what /v1/models names."""

    url: str
    model: str

    def vectors(self, body: dict[str, Any]) -> npt.NDArray[np.float32]:
        """What plain HTTP answers, for comparison: float32 `[n, dimensions]`."""
        answer = httpx.post(f"{self.url}/v1/embeddings", json=body, timeout=60).raise_for_status().json()
        return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


def same(vectors: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> bool:
    """Whether both are the same vectors: batched otherwise they may differ in the last bits."""
    return vectors.shape == expected.shape and np.allclose(vectors, expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """`EPD_TEST_URL` names a running service; without it a fake application is served on loopback."""
    if url := os.environ.get("EPD_TEST_URL"):
        (card,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        yield Service(url, card["id"])
        return
    application = FakeApplication()
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            started.set()

    config = uvicorn.Config(make_app(lambda: application), host="127.0.0.1", port=0, log_level="warning")
    server = Server(config)
    thread = threading.Thread(target=server.run, name="service")
    thread.start()
    assert started.wait(30)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Service(f"http://127.0.0.1:{port}", application.settings.model.served_name)
    server.should_exit = True
    thread.join(30)
