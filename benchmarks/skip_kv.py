"""Skip-KV against the paged path on the shape of Qwen3-Embedding-0.6B, on this machine's CPU.

    python -m benchmarks.skip_kv [--dtype float32 bfloat16] [--batches 30x30] [--repeats 5] [--shared]

Prints, for batches of 1, 8 and 30 x 30 and 8 x 512 tokens: the paged write (w), gather (g) and the attention
(a) of one layer; whole forwards of `kv_cache: none` against `kv_cache: paged` with `skip_kv: off`, in pairs;
and where a forward's time goes. Keeps what it printed in benchmarks/results/skip_kv.txt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from benchmarks.kv_timing import (
    CLOCKS,
    ForwardTimes,
    LayerTimes,
    about,
    make_model,
    profile_forward,
    time_forward,
    time_layer,
)
from benchmarks.report import RESULTS, table

BATCHES = ((1, 30), (8, 30), (30, 30), (8, 512))


def layer_row(name: str, times: LayerTimes) -> list[str]:
    """One line of the table of parts."""
    parts = [f"{seconds * 1e6:.0f}" for seconds in (times.write, times.gather, times.attend)]
    return [name, *parts, f"{times.ratio:.3f}"]


def forward_row(name: str, tokens: int, times: ForwardTimes) -> list[str]:
    """One line of the table of forwards."""
    skip, paged = median(times.skip), median(times.paged)
    ratios = [b / a for a, b in zip(times.skip, times.paged, strict=True)]
    return [
        name,
        str(len(ratios)),
        f"{skip * 1e3:.1f}",
        f"{paged * 1e3:.1f}",
        f"{times.ratio:.3f}",
        f"{min(ratios):.3f}..{max(ratios):.3f}",
        f"{tokens / skip:.0f}",
        f"{tokens / paged:.0f}",
        f"{times.skip_peak / 2**20:.0f}",
        f"{times.paged_peak / 2**20:.0f}",
    ]


LAYER_HEADER = ("one layer", "w us", "g us", "a us", "(w+g+a)/a")
FORWARD_HEADER = (
    "whole forward",
    "pairs",
    "skip ms",
    "paged ms",
    "paged/skip",
    "range",
    "skip tok/s",
    "paged tok/s",
    "skip peak MiB",
    "paged peak MiB",
)


def report(
    device: str, dtypes: Sequence[torch.dtype], batches: Sequence[tuple[int, int]], repeats: int
) -> Iterator[str]:
    """The text, section by section as it is measured."""
    yield about(device)
    for dtype in dtypes:
        model = make_model(dtype, device)
        layers, forwards = [], []
        for count, length in batches:
            name, tokens = f"{count} x {length} {str(dtype).removeprefix('torch.')}", count * length
            layers.append(layer_row(name, time_layer(count, length, dtype, device, max(5, 2 * repeats))))
            pairs = max(2, repeats // 2) if tokens > 1000 else repeats
            forwards.append(forward_row(name, tokens, time_forward(model, count, length, device, pairs)))
        yield table(LAYER_HEADER, layers)
        yield table(FORWARD_HEADER, forwards)
        for skip in (True, False):
            mode = "skip" if skip else "paged"
            profile = profile_forward(model, 30, 30, device, skip=skip)
            yield f"Profile of one {mode} forward, 30 x 30 {dtype}:\n{profile}"


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--batches", nargs="+", default=[f"{count}x{length}" for count, length in BATCHES])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shared", action="store_true", help="one thread, its CPU time: for a busy machine")
    options = parser.parse_args()
    if options.shared:
        torch.set_num_threads(1)
        CLOCKS["cpu"] = time.process_time
    batches = [(int(count), int(length)) for count, length in (b.split("x") for b in options.batches)]
    sections: list[str] = []
    for section in report("cpu", [getattr(torch, name) for name in options.dtype], batches, options.repeats):
        print(section, end="\n\n", flush=True)
        sections.append(section)
        (RESULTS / "skip_kv.txt").write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    main()
