"""The guard over skipping: each fact alone, their order, and the count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from epd.kernels.attention.guards import (
    BatchFacts,
    Decisions,
    LayerFacts,
    PathFacts,
    Reason,
    skip_refusal,
)

CASES = [
    (Reason.SWITCHED_OFF, BatchFacts(skip=False), LayerFacts(), PathFacts()),
    (Reason.NOT_SAVED, BatchFacts(save_kv_cache=False), LayerFacts(), PathFacts()),
    (Reason.GENERATION, BatchFacts(generation=True), LayerFacts(), PathFacts()),
    (Reason.CROSS_ATTENTION, BatchFacts(), LayerFacts(cross_attention=True), PathFacts()),
    (Reason.CACHED_PREFIX, BatchFacts(cached_prefix=True), LayerFacts(), PathFacts()),
    (Reason.PARTIAL_CHUNK, BatchFacts(partial_chunk=True), LayerFacts(), PathFacts()),
    (Reason.NOT_VERBATIM, BatchFacts(), LayerFacts(), PathFacts(stores_verbatim=False)),
    (Reason.SLIDING_WINDOW, BatchFacts(), LayerFacts(window=8), PathFacts(builds_window=False)),
    (Reason.KEPT_FOR_REUSE, BatchFacts(kept_for_reuse=True), LayerFacts(), PathFacts()),
]


def test_the_plain_case_skips() -> None:
    """With nothing against it, and with a window that the path builds, there is no reason."""
    assert skip_refusal(BatchFacts(), LayerFacts(), PathFacts()) is None
    assert skip_refusal(BatchFacts(), LayerFacts(window=8), PathFacts(builds_window=True)) is None


@pytest.mark.parametrize(("reason", "batch", "layer", "path"), CASES, ids=[case[0].value for case in CASES])
def test_each_fact_alone_is_a_reason(
    reason: Reason, batch: BatchFacts, layer: LayerFacts, path: PathFacts
) -> None:
    """One fact is enough, and it is the one that is named."""
    assert skip_refusal(batch, layer, path) is reason


def test_every_reason_has_a_case() -> None:
    """No reason without a fact that brings it about."""
    assert [case[0] for case in CASES] == list(Reason)


def test_the_first_reason_wins() -> None:
    """Of several reasons the guard names the first in the order of `Reason`."""
    batch = BatchFacts(
        skip=False,
        save_kv_cache=False,
        generation=True,
        cached_prefix=True,
        partial_chunk=True,
        kept_for_reuse=True,
    )
    layer, path = LayerFacts(cross_attention=True, window=8), PathFacts(False, False)
    named = [skip_refusal(batch, layer, path)]
    for lifted in (
        {"skip": True},
        {"save_kv_cache": True},
        {"generation": False},
    ):
        batch = replace(batch, **lifted)
        named.append(skip_refusal(batch, layer, path))
    layer = replace(layer, cross_attention=False)
    named.append(skip_refusal(batch, layer, path))
    for lifted in ({"cached_prefix": False}, {"partial_chunk": False}):
        batch = replace(batch, **lifted)
        named.append(skip_refusal(batch, layer, path))
    path = replace(path, stores_verbatim=True)
    named.append(skip_refusal(batch, layer, path))
    named.append(skip_refusal(batch, replace(layer, window=None), path))
    assert named == list(Reason)


def test_decisions_name_every_reason() -> None:
    """The counter's dict has every key from the start, so that metrics have no gaps."""
    decisions = Decisions()
    decisions.count(None)
    decisions.count(Reason.CACHED_PREFIX)
    decisions.count(Reason.CACHED_PREFIX)
    counts = decisions.as_dict()
    assert set(counts) == {"skipped", *Reason}
    assert counts["skipped"] == 1
    assert counts["cached_prefix"] == 2
    assert sum(counts.values()) == 3
