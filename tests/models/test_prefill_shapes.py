"""Skipping against paging over whole forwards: the demo checkpoint and the shape of Qwen3-Embedding-0.6B."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epd.cache.kv.settings import KVSettings
from epd.models.pieces import PrefillSequence
from epd.models.positions import mrope_positions
from epd.models.prefill import PrefillRunner, build_runner
from tests.models.pictures import png
from tests.models.pipeline import Pipeline
from tests.models.prefill_models import qwen3_06b, runner, text

DTYPES = [torch.float32, torch.bfloat16]
ITEMS: list[dict[str, Any]] = [
    {"parts": ["a red square on a blue ground"]},
    {"parts": [png(96, 64, 1), "what is this?"]},
    {"parts": ["a red square on a blue ground"], "instruction": "Find the picture"},
    {"parts": [png(64, 64, 2), png(48, 112, 3)]},
    {"parts": ["x"]},
]


class DemoPrefill:
    """The demo checkpoint's sequences and rows, ready for runners of any settings."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.pipeline = Pipeline(folder, dtype)
        self.sequences, pictures = [], []
        for number, item in enumerate(ITEMS):
            tokens = self.pipeline.sequence(item)
            positions = mrope_positions(tokens, self.pipeline.family.merge_size)
            keys = tuple(f"demo/{number}.{i}" for i in range(len(tokens.spans)))
            self.sequences.append(PrefillSequence(tokens, positions, keys))
            pictures += [part for part in item["parts"] if isinstance(part, bytes)]
        self.rows = torch.cat(self.pipeline.encode(pictures))

    def runner(self, **settings: Any) -> PrefillRunner:
        config = self.pipeline.checkpoint.read_json("config.json")
        assert isinstance(config, dict)
        return build_runner(self.pipeline.embedder, KVSettings(max_total_tokens=4096, **settings), config, {})

    def states(self, prefill: PrefillRunner) -> torch.Tensor:
        states = prefill.run(self.sequences, self.rows).states
        prefill.check_integrity()
        return states


@pytest.fixture(scope="module")
def demo(request: pytest.FixtureRequest, demo_folder: Path) -> DemoPrefill:
    return DemoPrefill(demo_folder, request.param)


@pytest.mark.parametrize("demo", DTYPES, indirect=True)
def test_the_demo_checkpoint_is_bitwise_the_same_without_a_cache(demo: DemoPrefill) -> None:
    """Text, pictures and deepstack, every layer skipped in one mode and paged in the other."""
    none, paged = demo.runner(), demo.runner(kv_cache="paged", skip_kv="off")
    assert torch.equal(demo.states(none), demo.states(paged))
    layers = demo.pipeline.embedder.kv_shape.num_layers
    assert none.stats()["skip_kv_skipped"] == layers
    assert paged.stats()["skip_kv_switched_off"] == layers


@pytest.mark.parametrize("demo", [torch.float32], indirect=True)
def test_the_demo_checkpoint_in_chunks_and_from_prefixes(demo: DemoPrefill) -> None:
    """Pictures cut across chunks and found again, at most 1e-5 from the plain result in float32."""
    plain = demo.states(demo.runner())
    cut = demo.runner(kv_cache="paged", prefill_chunk_tokens=13, prefix_cache=True)
    torch.testing.assert_close(demo.states(cut), plain, atol=1e-5, rtol=0)
    ran = cut.stats()["prefill_tokens"]
    torch.testing.assert_close(demo.states(cut), plain, atol=1e-5, rtol=0)
    assert cut.stats()["prefill_tokens"] - ran < ran / 3


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_the_06b_shape_is_bitwise_the_same_without_a_cache(dtype: torch.dtype) -> None:
    """28 layers of hidden size 1024, grouped queries 16/8 of 128."""
    model, batch = qwen3_06b(dtype), [text(n, n) for n in (3, 30, 30)]
    none, paged = runner(model), runner(model, kv_cache="paged", skip_kv="off")
    assert torch.equal(none.run(batch).states, paged.run(batch).states)
    assert none.stats()["skip_kv_skipped"] == paged.stats()["skip_kv_switched_off"] == 28


def test_the_06b_shape_in_chunks_and_from_prefixes() -> None:
    """At most 1e-5 from the plain result, relative to its size, and fewer tokens the second time."""
    model, batch = qwen3_06b(torch.float32), [text(40, 1), text(9, 2)]
    plain = runner(model).run(batch).states
    cut = runner(model, kv_cache="paged", prefill_chunk_tokens=16, prefix_cache=True)
    for _ in range(2):
        torch.testing.assert_close(cut.run(batch).states, plain, atol=1e-5, rtol=0)
    assert cut.stats()["prefill_tokens"] == 49 + 2
    cut.check_integrity()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_on_a_device_paging_is_bitwise_skipping(dtype: torch.dtype) -> None:
    """The same backend sees the same keys and values either way."""
    model, batch = qwen3_06b(dtype, "cuda"), [text(n, n) for n in (3, 30, 30, 200)]
    none, paged = runner(model), runner(model, kv_cache="paged", skip_kv="off")
    assert torch.equal(none.run(batch).states, paged.run(batch).states)
