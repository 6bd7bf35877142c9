"""The edge: parses requests, names pictures, and leads each request through both stages."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.serve.handle import DeploymentHandle

from epd.deployments.auth import Gate
from epd.deployments.clients import (
    STATUS_TIMEOUT_S,
    RayEmbedderClient,
    RayEncoderClient,
    every_stats,
    ready,
)
from epd.deployments.directory import StoreDirectory
from epd.deployments.draining import InProgress
from epd.deployments.errors import StageUnavailable
from epd.deployments.fetch import UrlFetcher
from epd.deployments.items import parse_input
from epd.deployments.loop_lag import LoopLag
from epd.deployments.metrics import Exporter, StageMetrics
from epd.deployments.preparation import ItemPreparer, TokenRules
from epd.deployments.replica import prepare_replica
from epd.deployments.requests import EmbeddingRequest
from epd.deployments.service import Embedded, EmbeddingService
from epd.deployments.settings import LimitSettings, Settings
from epd.deployments.stage import OpenModel, open_model, open_store
from epd.deployments.timing import Timings
from epd.models.images import ImagePreprocessor

# Longest that the lookup in the store may hold up a request: it saves a round, no more.
_LOOKUP_TIMEOUT_S = 0.25


class Ingress:
    """Holds no weights: the tokenizer, the picture headers' arithmetic, and handles of the stages.

    encoder: None for a model that takes text only. store: the managed store's deployment, or None.
    """

    def __init__(
        self,
        settings: Settings,
        embedder: DeploymentHandle,
        encoder: DeploymentHandle | None = None,
        store: DeploymentHandle | None = None,
    ) -> None:
        prepare_replica()
        self.settings = settings
        self._in_progress = InProgress()
        self.gate = Gate(settings.auth, os.environ)
        stages = {"embedder": embedder, "encoder": encoder, "store": store}
        self._stages = {name: handle for name, handle in stages.items() if handle is not None}
        model = open_model(settings.model)
        metrics = StageMetrics()
        self._directory: StoreDirectory | None = None
        if encoder is not None:
            store_client = open_store(settings.store)
            self._directory = StoreDirectory(
                store_client, timeout_s=min(_LOOKUP_TIMEOUT_S, settings.store.timeout_s)
            )
        self._loop_lag = LoopLag()
        self._loop_lag.start()
        self._exporter = Exporter(self.stats)
        self._exporter.start()
        self._service = EmbeddingService(
            _make_preparer(model, settings.limits),
            RayEncoderClient(encoder) if encoder is not None else None,
            RayEmbedderClient(embedder),
            hidden_size=model.family.hidden_size,
            request_timeout_s=settings.limits.request_timeout_s,
            directory=self._directory,
            timings=Timings(metrics.observe_step),
            fetch_urls=UrlFetcher(settings.fetch).fetch if settings.fetch.enabled else None,
        )
        self._model_info = {
            "name": settings.model.served_name,
            "type": model.checkpoint.model_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "dimensions": model.family.hidden_size,
        }

    async def embed(
        self,
        items: object,
        dimensions: int | None = None,
        instruction: str | None = None,
        cache_salt: str | None = None,
    ) -> npt.NDArray[np.float32]:
        """The handle API: vectors `[len(items), dimensions]` of a list of items, in order.

        Items are strings or `{"text", "image", "instruction"}` or `{"content": [...]}`, with images as
        bytes, data URIs or base64. Raises RequestError for the caller's mistakes.
        """
        parsed = await asyncio.to_thread(
            parse_input,
            items,
            max_items=self.settings.limits.max_items,
            instruction=instruction,
            allow_urls=self.settings.fetch.enabled,
        )
        with self._in_progress.request():
            return (await self._service.embed(parsed, dimensions, cache_salt)).vectors

    async def embed_request(self, request: EmbeddingRequest) -> Embedded:
        """The HTTP API: see `epd.deployments.http`."""
        with self._in_progress.request():
            return await self._service.embed(request.items, request.dimensions, request.cache_salt)

    async def drain(self) -> None:
        """Turns new requests away (503), and returns when those in progress have ended."""
        await self._in_progress.drain()

    async def health(self) -> dict[str, Any]:
        """Raises StageUnavailable unless every stage can serve; says when one does without its store."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                degraded = await asyncio.gather(
                    *(ready(handle, may_be_none=name == "encoder") for name, handle in self._stages.items())
                )
        except TimeoutError:
            raise StageUnavailable(f"a stage did not answer within {STATUS_TIMEOUT_S} s") from None
        return {"status": "degraded" if any(degraded) else "ok"}

    async def info(self) -> dict[str, Any]:
        """The model and the counters of every live replica, by stage."""
        stats = await asyncio.gather(*map(every_stats, self._stages.values()))
        stages = dict(zip(self._stages, stats, strict=True))
        return {"model": self._model_info, "ingress": await self.stats(), "stages": stages}

    async def stats(self) -> dict[str, Any]:
        """Counters of this replica since it started; its event loop's longest block of the last seconds."""
        return {
            "known_keys": self._directory.num_known if self._directory else 0,
            "loop_block_ms": round(self._loop_lag.longest_s * 1e3, 1),
            "pid": os.getpid(),
        }

    def __del__(self) -> None:
        if (directory := getattr(self, "_directory", None)) is not None:
            directory.close()


def _make_preparer(model: OpenModel, limits: LimitSettings) -> ItemPreparer:
    images, namespace = None, ""
    if model.takes_images:
        images = ImagePreprocessor(model.checkpoint, max_pixels=limits.max_image_pixels)
        namespace = model.namespace(images)
    return ItemPreparer(
        model.family.make_prompt(model.checkpoint),
        images,
        namespace,
        limits,
        TokenRules.of(model.family, model.checkpoint.config),
    )
