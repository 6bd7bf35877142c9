"""An application that tests can bend: what the HTTP routes call, without stages."""

from __future__ import annotations

from typing import Any

import numpy as np

from epd.deployments.auth import Gate
from epd.deployments.errors import RequestError
from epd.deployments.items import Item
from epd.deployments.requests import EmbeddingRequest
from epd.deployments.service import Embedded
from epd.deployments.settings import ModelSettings, Settings

HIDDEN = 8


class FakeApplication:
    """Answers each item with a vector of its content alone, or raises `error`; remembers every request."""

    def __init__(self, settings: Settings | None = None, environ: dict[str, str] | None = None) -> None:
        self.settings = settings or Settings(model=ModelSettings(name="fake"))
        self.gate = Gate(self.settings.auth, environ or {})
        self.error: Exception | None = None
        self.requests: list[EmbeddingRequest] = []

    async def embed_request(self, request: EmbeddingRequest) -> Embedded:
        self.requests.append(request)
        if self.error:
            raise self.error
        width = request.dimensions or HIDDEN
        if width > HIDDEN:
            raise RequestError(f"must be between 1 and {HIDDEN}, got {width}", "dimensions")
        return Embedded(np.stack([fake_vector(item, width) for item in request.items]), 7)

    async def health(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return {"status": "ok"}

    async def info(self) -> dict[str, Any]:
        return {"stages": {}}


def fake_vector(item: Item, width: int = HIDDEN) -> np.ndarray:
    """float32 `[width]` of unit length, the same for the same parts, ids and instruction."""
    parts = [part if isinstance(part, str) else getattr(part, "data", b"") for part in item.parts]
    seed = repr((parts, item.token_ids, item.instruction)).encode()
    values = np.random.default_rng(list(seed)).normal(size=HIDDEN)[:width]
    return np.asarray(values / np.linalg.norm(values), np.float32)
