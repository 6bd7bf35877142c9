"""The second stage: token ids and keys in, vectors out."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epd.cache.controller import EmbeddingCache
from epd.cache.errors import PoolBusy, RequestTooLarge
from epd.cache.handles import Handle
from epd.cache.rows import rows_from_numpy
from epd.cache.types import MediaGrid, MediaKey, Wanted
from epd.deployments.autoscaling import WAITING_TOKENS
from epd.deployments.batching import TokenBatcher
from epd.deployments.errors import Overloaded
from epd.deployments.messages import EmbedReply, MediaRef, RowsMessage, SequenceMessage
from epd.deployments.metrics import Exporter, StageMetrics
from epd.deployments.replica import prepare_replica
from epd.deployments.settings import Settings
from epd.deployments.stage import is_degraded, limit_threads, open_cache, open_model
from epd.deployments.timing import Timings
from epd.kernels.async_copy import AsyncCopy
from epd.models.pieces import PrefillSequence
from epd.models.pooling import finish, pool
from epd.models.positions import mrope_positions
from epd.models.prefill import build_runner
from epd.models.types import MediaSpan, TokenSequence

Vector = npt.NDArray[np.float32]

_POOL_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _Ready:
    """A sequence whose rows are all pinned in the pool, in the order of its spans."""

    sequence: PrefillSequence
    handles: tuple[Handle, ...]


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A batch whose rows are on the device, or on their way: `copy` tells."""

    sequences: Sequence[PrefillSequence]
    rows: torch.Tensor | None = None
    copy: AsyncCopy | None = None


class Embedder:
    """Owns the language model, a KV pool and, for a model with pictures, one embedding cache."""

    def __init__(self, settings: Settings) -> None:
        prepare_replica()
        model = open_model(settings.model)
        limit_threads(model, settings)
        self._family = model.family
        language_model = model.family.load_embedder(model.checkpoint, model.dtype, model.device)
        self._device, self._dtype = language_model.device, language_model.dtype
        config = model.checkpoint.settings
        self._runner = build_runner(language_model, settings.kv, config, os.environ)
        self._side_stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._side_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._cache: EmbeddingCache | None = None
        if model.takes_images:
            self._cache = open_cache(model, settings.embedder, settings.store)
        metrics = StageMetrics()
        self._timings = Timings(metrics.observe_step)
        self._batcher: TokenBatcher[_Ready, _Loaded, Vector] = TokenBatcher(
            self._load_batch,
            self._embed_batch,
            max_tokens=settings.embedder.max_batch_tokens,
            max_items=settings.embedder.max_batch_items,
            max_queued_tokens=settings.embedder.max_queued_tokens,
            step="prefill",
            timings=self._timings,
            observe_batch=metrics.observe_batch,
        )
        self._exporter = Exporter(self.stats)
        self._exporter.start()
        self._warm_up()
        self._closed = False

    async def embed(
        self,
        sequences: Sequence[SequenceMessage],
        rows: dict[str, RowsMessage] | None = None,
        dimensions: int | None = None,
    ) -> EmbedReply:
        """Vectors of the sequences whose rows can be had, and the keys that the others lack.

        rows: of pictures that no store holds. dimensions: leading values to keep before normalising.
        """
        with self._timings.collect() as timings:
            reply = await self._embed_all(sequences, rows or {}, dimensions)
        return replace(reply, timings=timings)

    async def _embed_all(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage], dimensions: int | None
    ) -> EmbedReply:
        groups = list(self._grouped(sequences))
        outcomes = await asyncio.gather(
            *(self._embed_group([sequences[i] for i in group], rows) for group in groups),
            return_exceptions=True,
        )
        vectors: list[Vector] = []
        done: list[int] = []
        missing: dict[str, None] = {}
        failed: dict[int, str] = {}
        for group, outcome in zip(groups, outcomes, strict=True):
            if isinstance(outcome, RequestTooLarge):  # a sequence alone in its group
                failed[group[0]] = str(outcome)
                continue
            if isinstance(outcome, PoolBusy):
                raise Overloaded(str(outcome))
            if isinstance(outcome, BaseException):
                raise outcome
            found, lacking = outcome
            missing |= dict.fromkeys(lacking)
            for index, vector in zip(group, found, strict=True):
                if vector is not None:
                    done.append(index)
                    vectors.append(vector)
        kept = torch.from_numpy(np.array(vectors, np.float32).reshape(len(done), self._family.hidden_size))
        finished = finish(kept, dimensions, normalize=self._family.normalize)
        return EmbedReply(finished.numpy(), tuple(done), tuple(missing), failed)

    async def stats(self) -> dict[str, Any]:
        """Counters of this replica since it started."""
        return {
            "embeds": self._batcher.num_items,
            "batches": self._batcher.num_batches,
            "embedded_tokens": self._batcher.num_tokens,
            "queued_tokens": self._batcher.queued_tokens,
            "cache": self._cache.stats() if self._cache else None,
            "prefill": self._runner.stats(),
            "kv": self._runner.info(),
            "pid": os.getpid(),
        }

    async def ready(self) -> bool:
        """Answers when the replica can serve: whether it does so without its store."""
        return self._cache is not None and is_degraded(self._cache)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For `TokenBacklogPolicy`: tokens that wait or run."""
        return {WAITING_TOKENS: self._batcher.waiting_tokens}

    async def check_health(self) -> None:
        if self._cache is not None:
            self._cache.check_integrity()

    def __del__(self) -> Awaitable[None] | None:
        if getattr(self, "_closed", True):
            return None
        self._closed = True
        return self._close()

    async def _close(self) -> None:
        self._exporter.stop()
        await self._batcher.close()
        if self._cache is not None:
            await self._cache.close()

    def _grouped(self, sequences: Sequence[SequenceMessage]) -> Iterator[list[int]]:
        """Indices of neighbouring sequences whose pictures are pinned together.

        A group takes at most `_POOL_SHARE` of the pool, so that one call leaves room for others, or is
        one sequence alone.
        """
        share = _POOL_SHARE * self._cache.pool.num_pages if self._cache else 0
        group: list[int] = []
        num_pages = 0
        for index, sequence in enumerate(sequences):
            pages = self._num_pages(sequence)
            if group and num_pages + pages > share:
                yield group
                group, num_pages = [], 0
            group.append(index)
            num_pages += pages
        if group:
            yield group

    def _num_pages(self, sequence: SequenceMessage) -> int:
        if self._cache is None:
            return 0
        lengths = {ref.key: ref.length for ref in sequence.media}
        return sum(map(self._cache.pool.pages_for, lengths.values()))

    async def _embed_group(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage]
    ) -> tuple[list[Vector | None], list[str]]:
        """A vector per sequence, None where a key is missing; and the missing keys."""
        with self._timings.step("fetch"):
            handles, missing = await self._pin(sequences, rows)
        try:
            whole = [i for i, s in enumerate(sequences) if all(ref.key in handles for ref in s.media)]
            outcomes = await asyncio.gather(
                *(self._submit(sequences[i], handles) for i in whole), return_exceptions=True
            )
            vectors: list[Vector | None] = [None] * len(sequences)
            for i, outcome in zip(whole, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    raise outcome
                vectors[i] = outcome
            return vectors, missing
        finally:
            if self._cache is not None:
                self._cache.release(handles.values())

    async def _submit(self, sequence: SequenceMessage, handles: dict[str, Handle]) -> Vector:
        ready = _Ready(self._prefill_sequence(sequence), tuple(handles[ref.key] for ref in sequence.media))
        return await self._batcher.submit(ready, sequence.num_tokens)

    async def _pin(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage]
    ) -> tuple[dict[str, Handle], list[str]]:
        """Pins on all rows that can be had, from the pool, the store or `rows`; and the keys that cannot."""
        refs = {ref.key: ref for sequence in sequences for ref in sequence.media}
        if not refs:
            return {}, []
        assert self._cache is not None, "sequences with pictures, and a model without"
        wanted = [_wanted(ref) for ref in refs.values()]
        # Who brings rows claims the keys, to fill them itself; who brings none just wants to know.
        ask_store = not refs.keys() <= rows.keys()
        acquired = await self._cache.acquire(wanted, claim=bool(rows), ask_store=ask_store)
        handles = {str(key): handle for key, handle in acquired.handles.items()}
        missing = [str(key) for key in acquired.missing]
        tickets = {str(key): ticket for key, ticket in acquired.tickets.items()}
        try:
            while tickets:
                key, ticket = tickets.popitem()
                if key in rows:
                    handles[key] = await self._cache.fill(
                        ticket, rows_from_numpy(rows[key].rows, self._cache.pool.layout)
                    )
                else:
                    self._cache.abandon([ticket])
                    missing.append(key)
        except BaseException:
            self._cache.abandon(tickets.values())
            self._cache.release(handles.values())
            raise
        return handles, missing

    def _prefill_sequence(self, message: SequenceMessage) -> PrefillSequence:
        spans = tuple(MediaSpan(ref.start, ref.length, MediaGrid(*ref.grid)) for ref in message.media)
        tokens = TokenSequence(message.token_ids.astype(np.int64), spans)
        positions = mrope_positions(tokens, self._family.merge_size)
        return PrefillSequence(tokens, positions, tuple(ref.key for ref in message.media), message.salt)

    def _load_batch(self, batch: Sequence[_Ready]) -> _Loaded:
        """Before the batch's turn on the device: the rows of its pictures, by one batched copy."""
        sequences = [ready.sequence for ready in batch]
        handles = [handle for ready in batch for handle in ready.handles]
        if not handles:
            return _Loaded(sequences)
        assert self._cache is not None
        *starts, num_rows = accumulate((handle.num_tokens for handle in handles), initial=0)
        row_dim = self._cache.pool.layout.row_dim
        with self._copy_stream():  # the memory too is this stream's, or it could still be in use by another
            rows = torch.empty((num_rows, row_dim), dtype=self._dtype, device=self._device)
            return _Loaded(sequences, rows, self._cache.load(handles, rows, starts))

    def _embed_batch(self, batch: _Loaded) -> Sequence[Vector]:
        """On the device's thread: prefill and pooling."""
        if batch.copy is not None and batch.rows is not None:
            batch.copy.wait_stream()
            if batch.rows.is_cuda:
                batch.rows.record_stream(torch.cuda.current_stream(batch.rows.device))
        hidden = self._runner.run(batch.sequences, batch.rows, self._family.pooling)
        return list(pool(hidden.states, hidden.lengths, self._family.pooling).cpu().numpy())

    def _copy_stream(self) -> AbstractContextManager[object]:
        """Rows of the next batch are copied beside the present one's compute."""
        return nullcontext() if self._side_stream is None else torch.cuda.stream(self._side_stream)

    def _warm_up(self) -> None:
        """One forward of a few tokens: the first is slow, and should not be a caller's."""
        tokens = TokenSequence(np.zeros(8, np.int64))
        positions = mrope_positions(tokens, self._family.merge_size)
        self._embed_batch(_Loaded([PrefillSequence(tokens, positions)]))


def _wanted(ref: MediaRef) -> Wanted:
    return Wanted(MediaKey.parse(ref.key), MediaGrid(*ref.grid), ref.length)
