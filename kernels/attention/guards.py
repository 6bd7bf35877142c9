"""When the skip path may run: the facts it depends on, the guard over them, and the count of decisions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a layer of a batch took the paged path, in the order in which the guard asks."""

    SWITCHED_OFF = "switched_off"
    NOT_SAVED = "kv_not_saved"
    GENERATION = "generation_model"
    CROSS_ATTENTION = "cross_attention"
    CACHED_PREFIX = "cached_prefix"
    PARTIAL_CHUNK = "partial_chunk"
    NOT_VERBATIM = "pool_not_verbatim"
    SLIDING_WINDOW = "sliding_window"
    KEPT_FOR_REUSE = "kept_for_reuse"


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a batch says about its keys and values.

    skip: the switch. save_kv_cache: whether they are to be stored; False where the store holds them
    already. generation: a later decode will read them. cached_prefix: some sequence continues from stored
    ones. partial_chunk: some sequence ends in a later batch. kept_for_reuse: they will serve as a
    prefix of later batches.
    """

    skip: bool = True
    save_kv_cache: bool = True
    generation: bool = False
    cached_prefix: bool = False
    partial_chunk: bool = False
    kept_for_reuse: bool = False


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a layer asks for. window: its sliding window where that is narrower than the batch."""

    cross_attention: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PathFacts:
    """What the store keeps (`stores_verbatim`) and what the skip path can compute (`builds_window`)."""

    stores_verbatim: bool = True
    builds_window: bool = True


def skip_refusal(batch: BatchFacts, layer: LayerFacts, path: PathFacts) -> Reason | None:
    """The first reason why skipping could change a result or lose what is wanted later; None: skip."""
    reasons = (
        (Reason.SWITCHED_OFF, not batch.skip),
        (Reason.NOT_SAVED, not batch.save_kv_cache),
        (Reason.GENERATION, batch.generation),
        (Reason.CROSS_ATTENTION, layer.cross_attention),
        (Reason.CACHED_PREFIX, batch.cached_prefix),
        (Reason.PARTIAL_CHUNK, batch.partial_chunk),
        (Reason.NOT_VERBATIM, not path.stores_verbatim),
        (Reason.SLIDING_WINDOW, layer.window is not None and not path.builds_window),
        (Reason.KEPT_FOR_REUSE, batch.kept_for_reuse),
    )
    return next((reason for reason, stands in reasons if stands), None)


class Decisions:
    """Attention calls (one per layer and forward) that skipped, and that did not by reason.

    One owner writes; `as_dict` may be read from elsewhere.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    def count(self, reason: Reason | None) -> None:
        self._calls["skipped" if reason is None else reason.value] += 1

    def as_dict(self) -> dict[str, int]:
        """`{"skipped": n, reason: n, ...}`, every reason present."""
        return {name: self._calls[name] for name in ("skipped", *Reason)}
