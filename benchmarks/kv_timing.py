"""What `skip_kv.py` (CPU) and `gpu_attention.py` (CUDA) measure alike: one layer's parts, whole forwards."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3Model

from benchmarks.report import machine
from benchmarks.shapes import SHAPE_06B
from epd.cache.kv.base import KVShape
from epd.cache.kv.leases import KVPages
from epd.cache.kv.paged import PagedKVPool
from epd.cache.kv.settings import KVSettings
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.attention import IMPLEMENTATION
from epd.models.pieces import PrefillSequence
from epd.models.positions import mrope_positions
from epd.models.prefill import PrefillRunner, build_runner
from epd.models.qwen3 import Qwen3LanguageModel
from epd.models.types import TokenSequence

# Vocabulary cut down.
VOCABULARY = 1000
LAYERS, HEADS = SHAPE_06B["num_hidden_layers"], SHAPE_06B["num_attention_heads"]
KV_HEADS, HEAD_SIZE = SHAPE_06B["num_key_value_heads"], SHAPE_06B["head_dim"]
KV_SHAPE = KVShape(LAYERS, KV_HEADS, HEAD_SIZE, HEAD_SIZE)
CONFIG: dict[str, Any] = {"model_type": "qwen3", "num_attention_heads": HEADS}


# Seconds by device. On one CPU thread `time.process_time` counts what this process got, whatever else runs.
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.perf_counter, "cuda": time.perf_counter}


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer's write into the pool, gather out of it, and attention."""

    write: float
    gather: float
    attend: float

    @property
    def ratio(self) -> float:
        """(w + g + a) / a: what the attention call costs with paging, relative to without."""
        return (self.write + self.gather + self.attend) / self.attend


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Seconds of whole forwards, pairs measured one after the other, and peak memory in bytes."""

    skip: list[float]
    paged: list[float]
    skip_peak: int
    paged_peak: int

    @property
    def ratio(self) -> float:
        """Median over pairs of paged / skip."""
        return median(b / a for a, b in zip(self.skip, self.paged, strict=True))


def make_model(dtype: torch.dtype, device: str) -> Qwen3LanguageModel:
    """The 0.6B shape with random weights: each layer has its own copy, as reading them takes time."""
    config = Qwen3Config(vocab_size=VOCABULARY, **SHAPE_06B)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    model = Qwen3Model._from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype).eval()
    for index in range(1, LAYERS):
        layer = deepcopy(model.layers[0])
        layer.self_attn.layer_idx = index
        model.layers.append(layer)
    config.num_hidden_layers = LAYERS
    return Qwen3LanguageModel(model.to(device))


def make_runner(model: Qwen3LanguageModel, tokens: int, *, skip: bool) -> PrefillRunner:
    """A runner whose every layer skips (`kv_cache: none`), or whose every layer pages."""
    values = {"kv_cache": "none"} if skip else {"kv_cache": "paged", "skip_kv": "off"}
    settings = KVSettings.model_validate({**values, "max_total_tokens": tokens})
    return build_runner(model, settings, CONFIG, {})


def make_sequences(count: int, length: int) -> list[PrefillSequence]:
    """`count` random texts of `length` tokens."""
    random = np.random.default_rng(0)
    texts = [TokenSequence(random.integers(0, VOCABULARY, length)) for _ in range(count)]
    return [PrefillSequence(tokens, mrope_positions(tokens, 1)) for tokens in texts]


@torch.inference_mode()
def time_layer(count: int, length: int, dtype: torch.dtype, device: str, repeats: int) -> LayerTimes:
    """One vectorised write and gather, as the paged mode does them, and the attention of both modes.

    Each repeat goes over all layers' pools in turn, so that no layer finds its own memory in a cache.
    """
    layout = SequenceLayout([length] * count, device)
    tokens = layout.num_tokens
    pool = PagedKVPool(
        KV_SHAPE, page_size=16, max_total_tokens=_padded(tokens), model_dtype=dtype, device=device
    )
    pages = KVPages(pool.num_pages, pool.page_size)
    leases = [pages.lease(length) for _ in range(count)]
    slots = torch.from_numpy(np.concatenate([lease.slots for lease in leases if lease])).to(device)
    q = torch.randn(tokens, HEADS, HEAD_SIZE, device=device).to(dtype)
    k, v = (torch.randn(tokens, KV_HEADS, HEAD_SIZE, device=device).to(dtype) for _ in range(2))
    attention = SkipKV(layout)
    parts: tuple[Callable[[int], object], ...] = (
        lambda layer: pool.set_kv(layer, slots, k, v),
        lambda layer: pool.get_kv(layer, slots, dtype),
        lambda layer: attention.attend(layer, q, k, v, causal=True, scale=HEAD_SIZE**-0.5),
    )
    times: list[list[float]] = [[], [], []]
    for repeat in range(repeats + 1):
        for part, into in zip(parts, times, strict=True):
            seconds = _timed(lambda part=part: [part(layer) for layer in range(LAYERS)], device)  # type: ignore[misc]
            if repeat:
                into.append(seconds / LAYERS)
    return LayerTimes(*(median(into) for into in times))


def time_forward(
    model: Qwen3LanguageModel, count: int, length: int, device: str, repeats: int
) -> ForwardTimes:
    """Whole forwards, skip and paged in turn. Peak memory is that of each one's warm-up, the paged pool
    not yet there when the skipping one runs.
    """
    sequences = make_sequences(count, length)
    runners, peaks = [], []
    for skip in (True, False):
        runners.append(make_runner(model, _padded(count * length), skip=skip))
        reset_peak(device)
        runners[-1].run(sequences)
        peaks.append(peak_bytes(device))
    times: list[list[float]] = [[], []]
    for repeat in range(repeats):
        for i in (0, 1) if repeat % 2 else (1, 0):
            times[i].append(_timed(lambda i=i: runners[i].run(sequences), device))  # type: ignore[misc]
    skipped, paged = (runner.stats() for runner in runners)
    assert skipped["skip_kv_skipped"] == paged["skip_kv_switched_off"] == LAYERS * (repeats + 1)
    return ForwardTimes(times[0], times[1], peaks[0], peaks[1])


def profile_forward(model: Qwen3LanguageModel, count: int, length: int, device: str, *, skip: bool) -> str:
    """torch.profiler's table of the ops that take most time of their own in one forward."""
    sequences, prefill = make_sequences(count, length), make_runner(model, _padded(count * length), skip=skip)
    prefill.run(sequences)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        prefill.run(sequences)
        _synchronize(device)
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    text: str = profile.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=40)
    return text


def reset_peak(device: str) -> None:
    """Start counting peak memory anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: str) -> int:
    """Peak memory since `reset_peak`: of the device, or resident of this process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def about(device: str) -> str:
    """One line: the machine, and what decides the times on this device."""
    name = [torch.cuda.get_device_name()] if device == "cuda" else []
    threads = f"{torch.get_num_threads()} threads"
    return machine(*name, threads, f"torch {torch.__version__}", CLOCKS[device].__name__)


def _padded(tokens: int) -> int:
    """Whole pages, with room for every sequence's last one."""
    return (tokens * 2 // 16 + 1) * 16


def _timed(call: Callable[[], object], device: str) -> float:
    clock = CLOCKS[device]
    _synchronize(device)
    start = clock()
    call()
    _synchronize(device)
    return clock() - start


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
