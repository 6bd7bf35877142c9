"""Faults that an engine could have: each is put in through a public seam, and the gate must see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.qwen3_vl import Qwen3VLFamily
from epd.models.types import PackedBatch
from tests.models.pictures import png
from tests.models.pipeline import Pipeline
from tests.oracle import COSINE_GATE, Oracle, cosine

HIDDEN_SIZE = 80  # of the sharded checkpoint
ITEM: dict[str, Any] = {"parts": ["first", png(112, 112, 1), "then", png(112, 112, 2), "what changed?"]}
OTHER: dict[str, Any] = {"parts": ["an unrelated neighbour in the same batch"]}


class FakeAcausalPass(SkipKV):
    """Forgets the causal mask."""

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGE: torch.Tensor, **options: object
    ) -> torch.Tensor:
        return super().attend(layer, q_THD, k_TGD, v_TGE, **{**options, "causal": False})  # type: ignore[arg-type]


def one_sequence(layout: SequenceLayout) -> SkipKV:
    """An attention pass that takes the whole batch for one sequence."""
    return SkipKV(SequenceLayout([layout.num_tokens], layout.device))


def rows_of(batch: PackedBatch) -> torch.Tensor:
    assert batch.media_rows is not None
    return batch.media_rows.clone()


def flat_positions(batch: PackedBatch) -> PackedBatch:
    places = torch.cat([torch.arange(length) for length in batch.lengths])
    return replace(batch, positions=places.expand(3, -1))


def no_deepstack(batch: PackedBatch) -> PackedBatch:
    rows = rows_of(batch)
    rows[:, HIDDEN_SIZE:] = 0
    return batch.with_rows(rows)


def swapped_deepstack(batch: PackedBatch) -> PackedBatch:
    merged, first, second, third = rows_of(batch).split(HIDDEN_SIZE, dim=1)  # type: ignore[no-untyped-call]
    return batch.with_rows(torch.cat([merged, second, first, third], dim=1))


def shifted_rows(batch: PackedBatch) -> PackedBatch:
    return batch.with_rows(rows_of(batch).roll(1, dims=0))


def swapped_images(batch: PackedBatch) -> PackedBatch:
    rows = rows_of(batch)
    return batch.with_rows(rows.roll(len(rows) // 2, dims=0))


def misplaced_rows(batch: PackedBatch) -> PackedBatch:
    assert batch.media_index is not None
    return replace(batch, media_index=batch.media_index + 1)


def worst_cosine(pipeline: Pipeline, oracle: Oracle, **faults: object) -> float:
    vectors = pipeline.embed([OTHER, ITEM], **faults)  # type: ignore[arg-type]
    return min(
        cosine(vector, oracle.embed(item)) for vector, item in zip(vectors, [OTHER, ITEM], strict=True)
    )


def test_no_fault_passes(sharded_pipeline: Pipeline, sharded_oracle: Oracle) -> None:
    """Without a fault the same items pass the gate."""
    assert worst_cosine(sharded_pipeline, sharded_oracle) >= COSINE_GATE


@pytest.mark.parametrize(
    "fault",
    [flat_positions, no_deepstack, swapped_deepstack, shifted_rows, swapped_images, misplaced_rows],
    ids=lambda fault: fault.__name__,
)
def test_the_gate_sees_a_broken_batch(
    sharded_pipeline: Pipeline,
    sharded_oracle: Oracle,
    fault: Callable[[PackedBatch], PackedBatch],
) -> None:
    """Wrong positions, lost or misplaced rows fall below the gate."""
    assert worst_cosine(sharded_pipeline, sharded_oracle, fault=fault) < COSINE_GATE


@pytest.mark.parametrize("attention", [FakeAcausalPass, one_sequence], ids=["no causal mask", "leak"])
def test_the_gate_sees_broken_attention(
    sharded_pipeline: Pipeline,
    sharded_oracle: Oracle,
    attention: Callable[[SequenceLayout], SkipKV],
) -> None:
    """A missing mask, and a sequence that sees its neighbour, fall below the gate."""
    assert worst_cosine(sharded_pipeline, sharded_oracle, attention=attention) < COSINE_GATE


def test_the_gate_sees_pictures_that_see_each_other(
    sharded_pipeline: Pipeline, sharded_oracle: Oracle
) -> None:
    """A vision tower that takes all pictures for one falls below the gate."""
    pipeline, family = sharded_pipeline, sharded_pipeline.family
    assert isinstance(family, Qwen3VLFamily)
    leaky = family.load_encoder(pipeline.checkpoint, torch.float32, "cpu", attention=one_sequence)
    pictures = [part for part in ITEM["parts"] if isinstance(part, bytes)]
    patches, grids = zip(*map(pipeline.images.patches, pictures), strict=True)
    rows = torch.cat(leaky.encode(patches, grids))
    vector = pipeline.embed([ITEM], fault=lambda batch: batch.with_rows(rows))[0]
    assert cosine(vector, sharded_oracle.embed(ITEM)) < COSINE_GATE
    assert not np.isnan(vector).any()
