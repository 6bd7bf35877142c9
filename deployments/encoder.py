"""The first stage: pictures in, rows in the store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any

import torch
from PIL import Image

from epd.cache.errors import PoolBusy, RequestTooLarge
from epd.cache.handles import Handle
from epd.cache.types import MediaGrid, MediaKey, Wanted
from epd.deployments.autoscaling import WAITING_TOKENS
from epd.deployments.batching import TokenBatcher
from epd.deployments.errors import Overloaded
from epd.deployments.joining import InFlight
from epd.deployments.messages import EncodeReply, MediaMessage, RowsMessage
from epd.deployments.metrics import Exporter, StageMetrics
from epd.deployments.replica import prepare_replica
from epd.deployments.settings import Settings
from epd.deployments.stage import is_degraded, limit_threads, open_cache, open_model
from epd.deployments.timing import Timings
from epd.models.errors import InvalidItem
from epd.models.images import ImagePreprocessor

Picture = tuple[torch.Tensor, MediaGrid]

# Published keys of which a replica remembers that they were, the oldest first to go.
_MAX_PUBLISHED = 100_000


class Encoder:
    """Owns the vision tower and one embedding cache. Holds no language weight.

    Calls are idempotent: a key that is being encoded, or lies in the pool, is not encoded again.
    """

    def __init__(self, settings: Settings) -> None:
        prepare_replica()
        model = open_model(settings.model)
        limit_threads(model, settings)
        self._images = ImagePreprocessor(model.checkpoint, max_pixels=settings.limits.max_image_pixels)
        self._tower = model.family.load_encoder(model.checkpoint, model.dtype, model.device)
        self._merge_size = model.family.merge_size
        self._cache = open_cache(model, settings.encoder, settings.store)
        self._in_flight: InFlight[tuple[str, bool], RowsMessage | None] = InFlight()
        self._published: dict[MediaKey, None] = {}
        self._cpu = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="decode")
        metrics = StageMetrics()
        self._timings = Timings(metrics.observe_step)
        self._batcher: TokenBatcher[Picture, Sequence[Picture], torch.Tensor] = TokenBatcher(
            list,
            self._encode_batch,
            max_tokens=settings.encoder.max_batch_tokens,
            max_items=settings.encoder.max_batch_items,
            max_queued_tokens=settings.encoder.max_queued_tokens,
            step="encode",
            timings=self._timings,
            observe_batch=metrics.observe_batch,
        )
        self._exporter = Exporter(self.stats)
        self._exporter.start()
        self._encode_batch([self._images.patches(_blank_picture())])  # the first is slow: not a caller's
        self._publish_grace_s = settings.store.publish_grace_s
        self._late_puts: set[asyncio.Task[bool]] = set()
        self._closed = False

    async def encode(self, media: Sequence[MediaMessage]) -> EncodeReply:
        """Encodes what the pool does not hold, publishes all, and says what became of each picture.

        A picture that cannot be read fails alone. Raises Overloaded when the queue is full.
        """
        with self._timings.collect() as timings:
            reply = await self._encode_all(media)
        return replace(reply, timings=timings)

    async def _encode_all(self, media: Sequence[MediaMessage]) -> EncodeReply:
        distinct = list({message.key: message for message in media}.values())
        # Every picture runs to its end before an error leaves, so that none is cut off mid-way by another's.
        outcomes = await asyncio.gather(*map(self._join_encode, distinct), return_exceptions=True)
        published: list[str] = []
        direct: dict[str, RowsMessage] = {}
        failed: dict[str, str] = {}
        for message, outcome in zip(distinct, outcomes, strict=True):
            if isinstance(outcome, InvalidItem | RequestTooLarge):
                failed[message.key] = str(outcome)
            elif isinstance(outcome, PoolBusy):
                raise Overloaded(str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome is None:
                published.append(message.key)
            else:
                direct[message.key] = outcome
        return EncodeReply(tuple(published), direct, failed)

    async def stats(self) -> dict[str, Any]:
        """Counters of this replica since it started."""
        return {
            "encodes": self._batcher.num_items,
            "batches": self._batcher.num_batches,
            "encoded_tokens": self._batcher.num_tokens,
            "queued_tokens": self._batcher.queued_tokens,
            "cache": self._cache.stats(),
            "pid": os.getpid(),
        }

    async def ready(self) -> bool:
        """Answers when the replica can serve: whether it does so without its store."""
        return is_degraded(self._cache)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `TokenBacklogPolicy`: picture tokens that wait or run."""
        return {WAITING_TOKENS: self._batcher.waiting_tokens}

    async def check_health(self) -> None:
        self._cache.check_integrity()

    def __del__(self) -> Awaitable[None] | None:
        if getattr(self, "_closed", True):
            return None
        self._closed = True
        return self._close()

    async def _close(self) -> None:
        self._exporter.stop()
        await self._batcher.close()
        await asyncio.gather(*self._late_puts, return_exceptions=True)
        self._cpu.shutdown()
        await self._cache.close()

    async def _join_encode(self, message: MediaMessage) -> RowsMessage | None:
        """`_encode_one`, once for all who ask meanwhile: a pool too small for what is asked would else evict
        what the next in line is about to ask for."""
        return await self._in_flight.run((message.key, message.direct), partial(self._encode_one, message))

    async def _encode_one(self, message: MediaMessage) -> RowsMessage | None:
        """None when the picture's rows are in the store, else the rows themselves."""
        handle = await self._obtain(message)
        putting = asyncio.create_task(self._put(handle))
        try:
            with self._timings.step("publish"):
                await asyncio.wait([putting], timeout=self._publish_grace_s)
            if putting.done() and putting.result() and not message.direct:
                return None
            return RowsMessage(message.grid, self._cache.rows(handle))
        finally:
            if putting.done():
                self._cache.release([handle])
            else:  # slow: it goes on by itself, and keeps the rows where they are until it ends
                self._late_puts.add(putting)
                putting.add_done_callback(partial(self._end_late_put, handle))

    async def _put(self, handle: Handle) -> bool:
        """Whether the store has the rows now."""
        stored = (await self._cache.publish([handle]))[handle.key]
        if stored:
            self._remember(handle.key)
        return stored

    def _end_late_put(self, handle: Handle, putting: asyncio.Task[bool]) -> None:
        self._late_puts.discard(putting)
        self._cache.release([handle])

    async def _obtain(self, message: MediaMessage) -> Handle:
        """A pin on the picture's rows, encoded now unless the pool holds them."""
        key, grid = MediaKey.parse(message.key), MediaGrid(*message.grid)
        num_tokens = grid.num_tokens(self._merge_size)
        # The caller has just asked the store: asking again would only cost time, but for what was published
        # here, it may be since then or while the caller could not read it.
        ask_store = key in self._published
        acquired = await self._cache.acquire([Wanted(key, grid, num_tokens)], claim=True, ask_store=ask_store)
        if (handle := acquired.handles.get(key)) is not None:
            return handle
        ticket = acquired.tickets[key]
        try:
            loop = asyncio.get_running_loop()
            with self._timings.step("decode"):
                patches, found = await loop.run_in_executor(self._cpu, self._images.patches, message.data)
            if found != grid:
                raise InvalidItem(f"the picture's grid is {found}, its header promised {grid}")
            rows = await self._batcher.submit((patches, grid), num_tokens)
            with self._timings.step("copy"):
                return await self._cache.fill(ticket, rows)
        except BaseException:
            self._cache.abandon([ticket])
            raise

    def _remember(self, key: MediaKey) -> None:
        self._published.pop(key, None)
        self._published[key] = None
        if len(self._published) > _MAX_PUBLISHED:
            del self._published[next(iter(self._published))]

    def _encode_batch(self, batch: Sequence[Picture]) -> Sequence[torch.Tensor]:
        patches, grids = zip(*batch, strict=True)
        return self._tower.encode(list(patches), list(grids))


def _blank_picture() -> bytes:
    """A small white picture's file."""
    file = BytesIO()
    Image.new("RGB", (64, 64), "white").save(file, "PNG")
    return file.getvalue()
