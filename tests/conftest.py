"""Fixtures that tests of every room share."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd.demo.checkpoint_format import write_checkpoint
from epd.models.checkpoint import demo_folder as find_demo_folder


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The trained checkpoint that comes with the package."""
    return find_demo_folder()


@pytest.fixture(scope="session")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights in several files, unlike the demo in every size."""
    return write_checkpoint(
        tmp_path_factory.mktemp("sharded"),
        vision={
            "depth": 6,
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_heads": 3,
            "patch_size": 14,
            "num_position_embeddings": 144,
            "deepstack_visual_indexes": [0, 2, 4],
        },
        text={
            "hidden_size": 80,
            "intermediate_size": 160,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
        vocab_size=900,
        append_end_of_text=False,
        shard_bytes=300_000,
        min_pixels=2 * 28 * 28,
        max_pixels=300 * 28 * 28,
        seed=7,
    )


@pytest.fixture(scope="session")
def photo() -> bytes:
    """A photograph, as JPEG."""
    return (Path(__file__).parent / "data" / "photo.jpg").read_bytes()
