"""The same vectors on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.pictures import png
from tests.models.pipeline import Pipeline
from tests.oracle import Oracle, assert_same, cosine

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ITEMS: list[dict[str, Any]] = [
    {"parts": ["a text of its own"]},
    {"parts": [png(120, 80, 1), "between", png(60, 60, 2)], "instruction": "Compare them"},
    {"parts": [png(200, 90, 3)]},
]


def test_float32(sharded_folder: Path, sharded_oracle: Oracle) -> None:
    """In float32 the gate is the same as on a CPU."""
    vectors = Pipeline(sharded_folder, torch.float32, "cuda").embed(ITEMS)
    for vector, item in zip(vectors, ITEMS, strict=True):
        assert_same(vector, sharded_oracle.embed(item))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_dtypes(sharded_folder: Path, sharded_oracle: Oracle, dtype: torch.dtype) -> None:
    """In a narrow dtype the vectors are near those in float32."""
    vectors = Pipeline(sharded_folder, dtype, "cuda").embed(ITEMS)
    for vector, item in zip(vectors, ITEMS, strict=True):
        assert cosine(vector, sharded_oracle.embed(item)) > 0.99
