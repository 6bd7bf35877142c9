"""Bytes of KV memory with `kv_cache: paged` and with `kv_cache: none`, at the same capacity in tokens.

    python -m benchmarks.kv_memory

Capacities that fit here are allocated and written, so that the resident size shows them; larger ones are
computed from the same pools on torch's meta device. Keeps what it printed in
benchmarks/results/kv_memory.txt.
"""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.kv_timing import about
from benchmarks.report import table
from epd.cache.kv.base import KVShape
from epd.cache.kv.noop import NoOpKVPool
from epd.cache.kv.paged import PagedKVPool
from tests.memory import resident

# num_hidden_layers, num_key_value_heads and head_dim of each model's config.json.
SHAPES = {
    "Qwen3-Embedding-0.6B": KVShape(28, 8, 128, 128),
    "Qwen3-VL-Embedding-2B": KVShape(28, 8, 128, 128),
    "Qwen3-VL-Embedding-8B": KVShape(36, 8, 128, 128),
}
ALLOCATED, COMPUTED = 16_384, 262_144
PAGE = 16
HEADER = ("model, bfloat16", "tokens", "paged bytes", "none bytes", "placeholder", "paged resident")
RESULTS = Path(__file__).parent / "results"


def measured_row(name: str, shape: KVShape) -> list[str]:
    """Both pools allocated, every byte of the paged one written."""
    none = NoOpKVPool(shape, page_size=PAGE, max_total_tokens=ALLOCATED, model_dtype=torch.bfloat16)
    before = resident()
    paged = PagedKVPool(shape, page_size=PAGE, max_total_tokens=ALLOCATED, model_dtype=torch.bfloat16)
    for layer in range(shape.num_layers):
        paged.k_view(layer).fill_(1)
        paged.v_view(layer).fill_(1)
    grown = resident() - before
    assert none.num_tokens == paged.num_tokens == ALLOCATED
    return _row(name, none, paged, f"{grown:,}")


def computed_row(name: str, shape: KVShape) -> list[str]:
    """Both pools without memory."""
    none = NoOpKVPool(
        shape, page_size=PAGE, max_total_tokens=COMPUTED, model_dtype=torch.bfloat16, device="meta"
    )
    paged = PagedKVPool(
        shape, page_size=PAGE, max_total_tokens=COMPUTED, model_dtype=torch.bfloat16, device="meta"
    )
    return _row(name, none, paged, "-")


def _row(name: str, none: NoOpKVPool, paged: PagedKVPool, grown: str) -> list[str]:
    sizes = (sum(paged.size_bytes()), sum(none.size_bytes()), none.placeholder_bytes)
    return [name, f"{paged.num_tokens:,}", *(f"{size:,}" for size in sizes), grown]


def main() -> None:
    """Measure, print and keep."""
    head = about("cpu")
    rows = [measured_row(name, shape) for name, shape in SHAPES.items()]
    rows += [computed_row(name, shape) for name, shape in SHAPES.items()]
    text = f"{head}\n\n{table(HEADER, rows)}\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kv_memory.txt").write_text(text)


if __name__ == "__main__":
    main()
