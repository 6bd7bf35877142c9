"""The registry of model families."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epd
from epd.cache.types import RowLayout
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError
from epd.models.families import family_of, supported_types
from epd.models.qwen3_vl import Qwen3VLLanguageModel
from tests.models.pipeline import Pipeline


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    """The error names the type and those that would do."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(CheckpointError, match="model_type 'mamba'; supported: bert, qwen3, qwen3_vl"):
        family_of(Checkpoint.open(tmp_path))
    assert supported_types() == ("bert", "qwen3", "qwen3_vl")


def test_families_are_imported_when_asked_for() -> None:
    """Importing the registry imports no model code."""
    asked = "'transformers' in sys.modules, 'epd.models.bert' in sys.modules"
    code = f"import sys, epd.models.families; print({asked})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(epd.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "False False", done.stderr


def test_facts_of_qwen3_vl(sharded: Checkpoint) -> None:
    """What other rooms ask of a family, for a checkpoint whose sizes are known."""
    family = family_of(sharded)
    assert (family.hidden_size, family.merge_size, family.max_tokens) == (80, 2, 32768)
    assert (family.takes_images, family.causal, family.normalize, family.pooling) == (
        True,
        True,
        True,
        "last",
    )
    assert family.row_layout(sharded, torch.bfloat16) == RowLayout(80 * 4, torch.bfloat16)
    assert (family.encoder_prefix, family.embedder_prefix) == ("model.visual.", "model.language_model.")


def test_facts_of_the_language_model(sharded_pipeline: Pipeline) -> None:
    """What a KV pool must hold."""
    model = sharded_pipeline.embedder
    assert isinstance(model, Qwen3VLLanguageModel)
    assert model.kv_shape == (5, 2, 32, 32)
    assert (model.dtype, model.device, model.causal) == (torch.float32, torch.device("cpu"), True)
