"""Prefill: the one owner of a replica's language model and KV pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from epd.cache.kv.base import KVPool, KVShape
from epd.cache.kv.checks import KVSettingsError, check_kv
from epd.cache.kv.factory import make_pool
from epd.cache.kv.families import describe_kv
from epd.cache.kv.leases import KVPages, Lease
from epd.cache.kv.settings import KVSettings
from epd.kernels.attention.base import Backend
from epd.kernels.attention.guarded import GuardedAttention
from epd.kernels.attention.guards import BatchFacts, Decisions
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.paged import PagedKV, Slots
from epd.models.base import LanguageModel
from epd.models.hidden import Hidden, HiddenCollector
from epd.models.piece_schedule import PieceSchedule
from epd.models.pieces import Packer, Piece, PrefillSequence, plan_whole, to_device
from epd.models.pooling import Pooling


def build_runner(
    model: LanguageModel,
    settings: KVSettings,
    config: Mapping[str, Any],
    environ: Mapping[str, str],
    backend: Backend | None = None,
) -> PrefillRunner:
    """A runner with the pool that `settings` ask for. `environ` is read here, once, for EPD_SKIP_KV.

    config: the model's parsed config.json. backend: None takes the best for each batch. Raises
    KVSettingsError when they do not go together.
    """
    settings = check_kv(settings, config, environ)
    if not model.causal and (settings.prefill_chunk_tokens or settings.prefix_cache):
        raise KVSettingsError(
            f"prefill_chunk_tokens={settings.prefill_chunk_tokens}, prefix_cache={settings.prefix_cache}: "
            "both need causal attention, and this model is bidirectional"
        )
    pool = make_pool(settings, KVShape(*model.kv_shape), model.dtype, model.device)
    generation = describe_kv(config).generation is not None
    return PrefillRunner(model, pool, settings, generation=generation, backend=backend)


class PrefillRunner:
    """Runs sequences through a language model, skipping the KV pool wherever the guards let it.

    Not thread-safe: one call of `run` at a time. A call that raises leaves no lease behind.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: KVPool,
        settings: KVSettings,
        *,
        generation: bool = False,
        backend: Backend | None = None,
    ) -> None:
        """settings: those in force, as `check_kv` returns them. backend: None takes the best there is."""
        self._model = model
        self._pool = pool
        self._settings = settings
        self._generation = generation
        self._backend = backend
        self._pages = KVPages(pool.num_pages, pool.page_size)
        self._decisions = Decisions()
        self._max_forward = min(settings.prefill_chunk_tokens or pool.num_tokens, pool.num_tokens)
        self._counts = {"prefill_forwards": 0, "prefill_tokens": 0, "prefix_hit_tokens": 0}

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence that `run` takes: the capacity of the pool, logical or not."""
        return self._pool.num_tokens

    def stats(self) -> dict[str, int]:
        """Counters and gauges: tokens, forwards, pages, and attention calls by decision (`skip_kv_*`)."""
        decisions = {f"skip_kv_{name}": n for name, n in self._decisions.as_dict().items()}
        return {**self._counts, **self._pages.stats(), **decisions}

    def info(self) -> dict[str, Any]:
        """How it is set up, and the attention calls by decision so far, for `/info`."""
        k_bytes, v_bytes = self._pool.size_bytes()
        return {
            **self._settings.model_dump(),
            "capacity_tokens": self._pool.num_tokens,
            "k_bytes": k_bytes,
            "v_bytes": v_bytes,
            "decisions": self._decisions.as_dict(),
        }

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page of the pool is accounted for."""
        self._pages.check_integrity()

    @torch.inference_mode()
    def run(
        self,
        sequences: Sequence[PrefillSequence],
        media_rows: torch.Tensor | None = None,
        pooling: Pooling = "last",
    ) -> Hidden:
        """Prefill and return the hidden states that `pooling` reads: one token's, or all for "mean".

        media_rows: `[V, row_dim]` on the model's device, the rows of all spans, sequence by sequence.
        Raises ValueError for no sequence, one beyond `max_sequence_tokens`, or a wrong number of rows;
        KVPoolAccessError when a layer reaches for memory that the pool does not have.
        """
        if not sequences:
            raise ValueError("no sequence to run")
        lengths = [sequence.num_tokens for sequence in sequences]
        if max(lengths) > self.max_sequence_tokens:
            raise ValueError(
                f"a sequence of {max(lengths)} tokens exceeds the capacity of {self.max_sequence_tokens} "
                f"(max_total_tokens={self._settings.max_total_tokens})"
            )
        packer = Packer(sequences, media_rows, self._model.device)
        out = HiddenCollector(lengths, pooling)
        whole, cut = self._split(lengths)
        for pieces in plan_whole(
            lengths, whole, self._max_forward, self._pool.num_pages, self._pool.page_size
        ):
            self._run_whole(pieces, packer, out)
        self._run_cut(cut, sequences, packer, out)
        return out.collect()

    def _split(self, lengths: Sequence[int]) -> tuple[list[int], list[int]]:
        """Sequences that run whole and may skip, and those that need pages from the start."""
        whole: list[int] = []
        cut: list[int] = []
        for index, length in enumerate(lengths):
            in_one = length <= self._max_forward and not self._settings.prefix_cache
            (whole if in_one else cut).append(index)
        return whole, cut

    def _run_whole(self, pieces: Sequence[Piece], packer: Packer, out: HiddenCollector) -> None:
        """One forward of whole sequences; they take pages only if a guard turns a layer down."""
        leases: list[Lease] = []
        try:
            out.add(pieces, self._forward(pieces, leases, packer, BatchFacts()))
        finally:
            for lease in leases:
                self._pages.end(lease)

    def _run_cut(
        self, cut: Sequence[int], sequences: Sequence[PrefillSequence], packer: Packer, out: HiddenCollector
    ) -> None:
        """Forwards of at most `_max_forward` new tokens each, until all `cut` sequences are done."""
        schedule = PieceSchedule(
            self._pages,
            {index: sequences[index] for index in cut},
            self._max_forward,
            keep=self._settings.prefix_cache,
            # Other poolings read hidden states of every token, also of those that a prefix would spare.
            reuse=self._settings.prefix_cache and out.pooling == "last",
        )
        try:
            while step := schedule.next_step():
                facts = BatchFacts(
                    cached_prefix=any(progress.lease.cached_tokens for progress in step),
                    partial_chunk=any(progress.is_partial for progress in step),
                    kept_for_reuse=self._settings.prefix_cache,
                )
                pieces = [progress.piece for progress in step]
                leases = [progress.lease for progress in step]
                out.add(pieces, self._forward(pieces, leases, packer, facts))
                schedule.finish_step()
        finally:
            schedule.close()
        self._counts["prefix_hit_tokens"] += schedule.hit_tokens

    def _forward(
        self, pieces: Sequence[Piece], leases: list[Lease], packer: Packer, facts: BatchFacts
    ) -> torch.Tensor:
        """Hidden states `[T, hidden_size]`. Without leases, the paged path takes them when it first runs."""
        layout = SequenceLayout([piece.num_tokens for piece in pieces], self._model.device)
        attention = GuardedAttention(
            layout,
            replace(facts, skip=self._settings.skip_kv != "off", generation=self._generation),
            self._decisions,
            lambda: self._paged_pass(layout, pieces, leases),
            stores_verbatim=self._pool.stores_verbatim,
            backend=self._backend,
        )
        hidden_TH = self._model.forward(packer.pack(pieces), attention)
        self._counts["prefill_forwards"] += 1
        self._counts["prefill_tokens"] += layout.num_tokens
        return hidden_TH

    def _paged_pass(self, layout: SequenceLayout, pieces: Sequence[Piece], leases: list[Lease]) -> PagedKV:
        if not leases:
            for piece in pieces:
                lease = self._pages.lease(piece.num_tokens)
                assert lease is not None, "the batch was planned to fit an empty pool"
                leases.append(lease)
        device = self._model.device
        own = [lease.slots[p.start : p.end] for p, lease in zip(pieces, leases, strict=True)]
        context = [lease.slots[: p.end] for p, lease in zip(pieces, leases, strict=True)]
        slots = Slots(
            context=SequenceLayout([p.end for p in pieces], device),
            write=to_device(np.concatenate(own), device),
            read=to_device(np.concatenate(context), device),
        )
        return PagedKV(self._pool, layout, slots, backend=self._backend)
