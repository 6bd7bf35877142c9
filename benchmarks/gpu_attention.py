"""Skip-KV against the paged path on a CUDA device; for `benchmarks/gpu.py` to call, or alone:

    python -m benchmarks.gpu_attention

Never executed on a device: no machine with one was at hand. The goals are those of two published systems
(16.7 % lower batch latency at 30 sequences of about 30 tokens; about 6 % more throughput from a pool that
allocates nothing): a whole forward of 30 x 30 tokens at least 17 % lower, and throughput at least 6 % higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.kv_timing import (
    ForwardTimes,
    about,
    make_model,
    profile_forward,
    time_forward,
    time_layer,
)
from benchmarks.report import table
from benchmarks.skip_kv import BATCHES, FORWARD_HEADER, LAYER_HEADER, forward_row, layer_row
from epd.kernels.attention.backends import backend_for

LATENCY_GOAL = 0.17
THROUGHPUT_GOAL = 0.06
# For throughput: as many short sequences as a default forward holds.
FULL_BATCH = (512, 30)
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Goal:
    """A share that was gained, and the share that was asked for."""

    name: str
    gained: float
    asked: float

    @property
    def met(self) -> bool:
        return self.gained >= self.asked

    def __str__(self) -> str:
        verdict = "met" if self.met else "NOT met"
        return f"{self.name}: {self.gained:+.1%}, asked {self.asked:+.0%}: {verdict}"


def latency_goal(times: ForwardTimes) -> Goal:
    """How much lower a forward's time is without paging."""
    return Goal("lower latency, whole forward, 30 x 30", 1 - 1 / times.ratio, LATENCY_GOAL)


def throughput_goal(times: ForwardTimes) -> Goal:
    """How many more tokens a second pass without paging."""
    return Goal("more tokens a second, whole forward, full batch", times.ratio - 1, THROUGHPUT_GOAL)


def measure(
    repeats: int = 20,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    batches: Sequence[tuple[int, int]] = (*BATCHES, FULL_BATCH),
) -> tuple[str, list[Goal]]:
    """The report and the goals. Any device will do to try the program; goals are judged on CUDA alone, and
    not on fewer than 10 pairs: single pairs on a busy CPU differed by a third from noise alone.

    batches: (sequences, tokens of each); 30 x 30 decides on latency and the last on throughput.
    """
    model = make_model(dtype, device)
    layers, forwards, timed = [], [], {}
    for count, length in batches:
        name = f"{count} x {length}"
        layers.append(layer_row(name, time_layer(count, length, dtype, device, repeats)))
        timed[count, length] = times = time_forward(model, count, length, device, repeats)
        forwards.append(forward_row(name, count * length, times))
    judged = device == "cuda" and repeats >= 10
    goals = [latency_goal(timed[30, 30]), throughput_goal(timed[batches[-1]])] if judged else []
    probe = torch.empty(1, 16, 128, dtype=dtype, device=device)
    parts = [
        about(device),
        f"attention backend: {backend_for(probe, probe).name}, {dtype}",
        table(LAYER_HEADER, layers),
        table(FORWARD_HEADER, forwards),
        "\n".join(map(str, goals)) or "goals not judged",
        profile_forward(model, 30, 30, device, skip=True),
    ]
    return "\n\n".join(parts) + "\n", goals


def main() -> None:
    """Measure, print and keep; exit 1 when a goal is not met."""
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    text, goals = measure()
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu_attention.txt").write_text(text)
    if not all(goal.met for goal in goals):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
