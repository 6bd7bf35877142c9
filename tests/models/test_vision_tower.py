"""The vision tower: rows of pictures packed together, and its first layer."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from epd.cache.types import MediaGrid
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.checkpoint import Checkpoint
from epd.models.families import family_of
from epd.models.images import ImagePreprocessor
from epd.models.patch_embedding import PatchEmbedding
from epd.models.qwen3_vl import Qwen3VLFamily
from tests.models.pictures import png
from tests.models.pipeline import Pipeline
from tests.oracle import Oracle

PICTURES = [png(60, 90, 1), png(90, 60, 2), png(200, 60, 3), png(60, 90, 4)]


class CountingPass(SkipKV):
    """Counts its calls, and notes what it was asked."""

    calls: list[tuple[int, bool, int]]

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGE: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        self.calls.append((layer, options["causal"], len(q_THD)))
        return super().attend(layer, q_THD, k_TGD, v_TGE, **options)


def test_rows_equal_the_plain_vision_model(sharded_pipeline: Pipeline, sharded_oracle: Oracle) -> None:
    """A row is the merged feature, then the deepstack features in order."""
    for data, rows in zip(PICTURES, sharded_pipeline.encode(PICTURES), strict=True):
        image = Image.open(BytesIO(data)).convert("RGB")
        made = sharded_oracle.processor.image_processor(images=[image], return_tensors="pt")
        with torch.inference_mode():
            out = sharded_oracle.model.visual(made["pixel_values"], grid_thw=made["image_grid_thw"])
        expected = torch.cat([out.pooler_output, *out.deepstack_features], dim=1)
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


def test_packed_equals_alone(sharded_pipeline: Pipeline) -> None:
    """A picture's rows do not depend on its neighbours in the forward."""
    for data, packed in zip(PICTURES, sharded_pipeline.encode(PICTURES), strict=True):
        (alone,) = sharded_pipeline.encode([data])
        torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_one_attention_call_a_layer(sharded: Checkpoint) -> None:
    """However many pictures: the layers attend through the pass, once each, in order, without a mask."""
    family = family_of(sharded)
    assert isinstance(family, Qwen3VLFamily)
    calls: list[tuple[int, bool, int]] = []

    def counting(layout: SequenceLayout) -> CountingPass:
        made = CountingPass(layout)
        made.calls = calls
        return made

    tower = family.load_encoder(sharded, torch.float32, "cpu", attention=counting)
    patches, grids = zip(*map(ImagePreprocessor(sharded).patches, PICTURES), strict=True)
    tower.encode(patches, grids)
    total = sum(grid.num_patches for grid in grids)
    assert calls == [(layer, False, total) for layer in range(6)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(sharded_folder: Any, sharded_pipeline: Pipeline, dtype: torch.dtype) -> None:
    """Rows and hidden states come in the dtype that was asked for, near those in float32."""
    narrow = Pipeline(sharded_folder, dtype)
    rows, wide = narrow.encode(PICTURES[:1])[0], sharded_pipeline.encode(PICTURES[:1])[0]
    assert (rows.dtype, narrow.encoder.dtype, narrow.embedder.dtype) == (dtype, dtype, dtype)
    assert nn.functional.cosine_similarity(rows.float(), wide, dim=1).min() > 0.99
    item = {"parts": [PICTURES[0], "text"]}
    vector, expected = narrow.embed([item])[0], sharded_pipeline.embed([item])[0]
    assert float(vector @ expected) > 0.99


@pytest.mark.parametrize(
    ("patches", "grids"),
    [
        ([], []),
        ([torch.zeros(4, 588, dtype=torch.uint8)], []),
        ([torch.zeros(4, 588, dtype=torch.uint8)], [MediaGrid(1, 2, 4)]),
    ],
)
def test_patches_that_do_not_match_are_refused(
    sharded_pipeline: Pipeline, patches: list[torch.Tensor], grids: list[MediaGrid]
) -> None:
    """No pictures, or patches and grids that disagree."""
    with pytest.raises(ValueError, match="do not match"):
        sharded_pipeline.encoder.encode(patches, grids)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_patch_embedding_is_the_convolution(frames: int) -> None:
    """On a still picture the matrix product equals the convolution over its repeated frame."""
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 20, (frames, 8, 8), (frames, 8, 8))
    table = torch.randn(3, 256)
    patches = torch.randint(0, 256, (11, 192), dtype=torch.uint8)
    pixels = torch.stack([table[c][patches.view(11, 3, 64)[:, c].long()] for c in range(3)], dim=1)
    clip = pixels.view(11, 3, 1, 8, 8).expand(-1, -1, frames, -1, -1)
    with torch.inference_mode():
        expected = convolution(clip).view(11, 20)
        found = PatchEmbedding(convolution, table)(patches)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
