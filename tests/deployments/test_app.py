"""The builder: what it wires, and what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epd.cache.kv.checks import KVSettingsError
from epd.deployments.app import build
from epd.deployments.settings import Settings
from epd.models.errors import CheckpointError


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        ({"kv_cache": "none", "skip_kv": "off"}, "skip_kv=off"),
        ({"kv_cache": "none", "prefix_cache": True}, "prefix_cache"),
        ({"kv_cache": "none", "prefill_chunk_tokens": 512}, "prefill_chunk_tokens=512"),
        ({"kv_cache": "none", "kv_cache_dtype": "fp4"}, "kv_cache_dtype=fp4"),
        ({"kv_cache": "paged", "context_parallel_size": 2}, "context_parallel_size=2"),
    ],
)
def test_kv_settings_that_cannot_serve_are_refused_by_the_builder(kv: dict[str, Any], words: str) -> None:
    """The refusal names the setting and its value, and comes before Ray starts a replica."""
    with pytest.raises(KVSettingsError, match=words):
        build(Settings.model_validate({"kv": kv}))


def test_a_checkpoint_that_is_not_there_is_refused_by_the_builder(tmp_path: Path) -> None:
    """A folder without a checkpoint is an error that names it."""
    with pytest.raises(CheckpointError, match=tmp_path.name):
        build(Settings.model_validate({"model": {"path": str(tmp_path)}}))


def test_the_default_application_has_every_deployment() -> None:
    """Ingress leads; it is bound to both stages and to the managed store."""
    application = build(Settings())
    assert application._bound_deployment.name == "Ingress"
    bound = [argument for argument in application._bound_deployment.init_args[1:] if argument is not None]
    assert [each._bound_deployment.name for each in bound] == ["Embedder", "Encoder", "MooncakeStore"]
