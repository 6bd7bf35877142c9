"""The application without Ray: its real parser, preparation, orchestration and stages, in this process."""

from __future__ import annotations

import itertools
import os
from typing import Any

import httpx

from epd.deployments.auth import Gate
from epd.deployments.embedder import Embedder
from epd.deployments.encoder import Encoder
from epd.deployments.http import make_app
from epd.deployments.preparation import ItemPreparer, TokenRules
from epd.deployments.requests import EmbeddingRequest
from epd.deployments.service import Embedded, EmbeddingService
from epd.deployments.settings import AuthSettings, LimitSettings, Settings, StageSettings, StoreSettings
from epd.deployments.stage import open_model
from epd.models.images import ImagePreprocessor

_POOL = StageSettings(pool_bytes=8 * 2**20)
_runs = itertools.count()


class LocalApplication:
    """Serves the demo checkpoint over a store of its own in shared memory.

    Create it, and close it, on the event loop that serves.
    """

    def __init__(self, limits: LimitSettings, auth: AuthSettings, environ: dict[str, str]) -> None:
        # The store's name follows its address.
        store = StoreSettings(
            backend="shared_memory", host_bytes=8 * 2**20, address=f"test-{os.getpid()}:{next(_runs) + 1}"
        )
        self.settings = Settings(
            limits=limits, auth=auth, store=store, encoder=_POOL, embedder=_POOL
        ).resolved(has_gpu=False)
        self.gate = Gate(auth, environ)
        model = open_model(self.settings.model)
        images = ImagePreprocessor(model.checkpoint, max_pixels=limits.max_image_pixels)
        preparer = ItemPreparer(
            model.family.make_prompt(model.checkpoint),
            images,
            model.namespace(images),
            limits,
            TokenRules.of(model.family, model.checkpoint.config),
        )
        self.encoder = Encoder(self.settings)
        self.embedder = Embedder(self.settings)
        self._service = EmbeddingService(
            preparer,
            self.encoder,
            self.embedder,
            hidden_size=model.family.hidden_size,
            request_timeout_s=limits.request_timeout_s,
        )

    async def embed_request(self, request: EmbeddingRequest) -> Embedded:
        return await self._service.embed(request.items, request.dimensions, request.cache_salt)

    async def health(self) -> dict[str, Any]:
        return {"status": "ok"}

    async def info(self) -> dict[str, Any]:
        return {}

    async def num_encodes(self) -> int:
        """Pictures that went through the vision tower since the start."""
        encodes: int = (await self.encoder.stats())["encodes"]
        return encodes

    def client(self) -> httpx.AsyncClient:
        """A client of its HTTP routes."""
        transport = httpx.ASGITransport(make_app(lambda: self), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    async def close(self) -> None:
        """Checks that nothing was left behind, then ends both stages."""
        for stage in (self.encoder, self.embedder):
            await stage.check_health()
            stats = (await stage.stats())["cache"]
            assert (stats["pins"], stats["filling"], stats["waiting"]) == (0, 0, 0), stats
            closing = stage.__del__()
            assert closing is not None
            await closing
