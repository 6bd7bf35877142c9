"""Checkpoints opened once for all tests of the model room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from epd.models.checkpoint import Checkpoint
from epd.models.images import ImagePreprocessor
from tests.models.pipeline import Pipeline
from tests.oracle import Oracle


@pytest.fixture(scope="session")
def sharded(sharded_folder: Path) -> Checkpoint:
    return Checkpoint.open(sharded_folder)


@pytest.fixture(scope="session")
def sharded_pipeline(sharded_folder: Path) -> Pipeline:
    return Pipeline(sharded_folder)


@pytest.fixture(scope="session")
def sharded_oracle(sharded_folder: Path) -> Oracle:
    return Oracle(sharded_folder)


@pytest.fixture(scope="session")
def demo_pipeline(demo_folder: Path) -> Pipeline:
    return Pipeline(demo_folder)


@pytest.fixture(scope="session")
def demo_oracle(demo_folder: Path) -> Oracle:
    return Oracle(demo_folder)


@pytest.fixture(scope="session")
def images(sharded: Checkpoint) -> ImagePreprocessor:
    return ImagePreprocessor(sharded)


@pytest.fixture(scope="session")
def processor(sharded: Checkpoint) -> Any:
    """transformers' own, on Pillow."""
    return Qwen2VLImageProcessorPil.from_pretrained(sharded.folder)
