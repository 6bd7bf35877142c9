"""What the deployments open alike: the model, the store, and the embedding cache of a stage."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import ray.util
import torch

from epd.cache.breaker import BreakerState
from epd.cache.controller import EmbeddingCache
from epd.cache.entry import HEADER_BYTES
from epd.cache.errors import StoreUnavailable
from epd.cache.keys import namespace
from epd.cache.pool import PagePool
from epd.cache.stores.base import Store
from epd.cache.stores.factory import make_store
from epd.cache.types import RowLayout
from epd.deployments.settings import ModelSettings, Settings, StageSettings, StoreSettings
from epd.models.base import Family
from epd.models.checkpoint import Checkpoint
from epd.models.families import family_of, resolve_dtype
from epd.models.images import ImagePreprocessor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A checkpoint with its family, and the dtype and device that the application computes in."""

    checkpoint: Checkpoint
    family: Family
    dtype: torch.dtype
    device: torch.device

    @property
    def takes_images(self) -> bool:
        return self.row_layout is not None

    @property
    def row_layout(self) -> RowLayout | None:
        """Layout of a picture's rows; None for a model that takes text only."""
        return self.family.row_layout(self.checkpoint, self.dtype)

    def namespace(self, images: ImagePreprocessor) -> str:
        """Names the rows of this model's encoders; reads the vision weights of a local folder once."""
        checkpoint = self.checkpoint
        commit = f"{checkpoint.name}@{checkpoint.revision}" if checkpoint.revision else None
        return namespace(
            model=checkpoint.model_type,
            weights=commit or self.family.encoder_digest(checkpoint),
            dtype=self.dtype,
            preprocessing=images.fingerprint,
        )


def open_model(settings: ModelSettings) -> OpenModel:
    """Raises CheckpointError when the checkpoint cannot be served. `settings.device` must be resolved."""
    checkpoint = Checkpoint.open(settings.path, settings.revision)
    device = torch.device(settings.device)
    return OpenModel(
        checkpoint, family_of(checkpoint), resolve_dtype(checkpoint, settings.dtype, device), device
    )


def limit_threads(model: OpenModel, settings: Settings) -> None:
    """Gives torch `cpu_threads` in a replica that computes on the CPU, whatever Ray's environment says."""
    if model.device.type == "cpu":
        torch.set_num_threads(settings.cpu_threads)


def open_store(settings: StoreSettings) -> Store:
    """A client of the store, behind its circuit breaker.

    Waits for the master for `start_timeout_s`: replicas and a managed master start side by side. Raises
    StoreUnavailable when it has not come by then, and ValueError when `host_path` is no folder, or has
    no room for `host_bytes`.
    """
    if settings.host_bytes and not Path(settings.host_path).is_dir():
        raise ValueError(f"store.host_path is {settings.host_path!r}, and there is no such folder here")
    deadline = time.monotonic() + settings.start_timeout_s
    while True:
        try:
            store = make_store(
                mooncake_master=settings.address if settings.backend == "mooncake" else None,
                host=_client_host(settings),
                protocol=settings.protocol,
                device=settings.device,
                shared_memory_name=_host_name(settings) if settings.host_bytes else None,
                shared_memory_bytes=settings.host_bytes,
                shared_memory_parent=Path(settings.host_path),
                timeout_s=settings.timeout_s,
            )
            break
        except StoreUnavailable as error:
            if time.monotonic() > deadline:
                raise
            logger.info("waiting for the store: %s", error)
            time.sleep(0.5)
    assert store is not None, "a master or shared memory was named"
    return store


def _host_name(settings: StoreSettings) -> str:
    """Of the shared memory: replicas with one master share it, also those of two applications."""
    return f"rows-{hashlib.blake2b(settings.address.encode(), digest_size=8).hexdigest()}"


def _client_host(settings: StoreSettings) -> str:
    if settings.client_host != "auto":
        return settings.client_host
    address: str = ray.util.get_node_ip_address()
    return address


def open_cache(model: OpenModel, stage: StageSettings, store: StoreSettings) -> EmbeddingCache:
    """The page pool of a stage and the store behind it. Call it on the event loop that will use it."""
    layout = model.row_layout
    assert layout is not None, "a model without pictures needs no cache"
    num_pages = stage.pool_bytes // (stage.page_tokens * layout.row_bytes + HEADER_BYTES)
    pool = PagePool(layout, stage.page_tokens, num_pages)
    return EmbeddingCache(pool, open_store(store), timeout_s=store.timeout_s)


def is_degraded(cache: EmbeddingCache) -> bool:
    """Whether the cache does without its store: it fails too often, or a call to it hangs."""
    stats = cache.stats()
    return stats["breaker_state"] != BreakerState.CLOSED or stats["calls_hung"] > 0
