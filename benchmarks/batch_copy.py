"""What planning and submitting a fragmented copy costs on the host, per range; no GPU needed.

    python -m benchmarks.batch_copy

The real C extension submits to a fake driver library that does nothing, so what is timed is ours alone: from
the arguments of `transfer_ranges` to the driver, the checks of both tensors included, the CUDA event that
follows not. The baseline is a loop of `copy_` over the same ranges, one row of 8 bytes each, so that its
dispatch is what it costs. Times are CPU time of the thread, so that other load on the machine counts less.
Keeps what it printed in benchmarks/results/batch_copy.txt.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.report import RESULTS, machine, table
from epd.kernels.batch_copy import Driver
from epd.kernels.transfer import TransferPlan, check_tables, native_refusal, submit
from tests.kernels.fake_driver import FakeDriver
from tests.kernels.native_build import compile_extension, compile_fake_driver, import_extension

NUM_RANGES = (65, 128, 256, 512, 1024, 4096)
GOAL_US = 0.3
"""Microseconds a range, above 64 ranges."""
STREAM = 0x7000
REPEATS = 15
HEADER = ("ranges", "plan, arrays", "plan, lists", "all", "its median", "plan reused", "copy_ loop", "ratio")


@dataclass(frozen=True, slots=True)
class Ranges:
    """Fragments of one row with gaps between them, in random order: nothing to merge, all to sort."""

    src: list[int]
    dst: list[int]
    lengths: list[int]

    @classmethod
    def shuffled(cls, num_ranges: int) -> Ranges:
        generator = random.Random(num_ranges)
        places = [i * 3 for i in range(num_ranges)]
        return cls(
            generator.sample(places, num_ranges), generator.sample(places, num_ranges), [1] * num_ranges
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds a range: the best and the median of several runs."""

    best: float
    middle: float


def cost(call: Callable[[], object], num_ranges: int) -> Cost:
    """Time of `call`, which deals with `num_ranges` ranges."""
    number = max(3, 20_000 // num_ranges)
    seconds = timeit.repeat(call, number=number, repeat=REPEATS, timer=time.thread_time)
    per_range = [s / number / num_ranges * 1e6 for s in seconds]
    return Cost(min(per_range), median(per_range))


def measure(driver: Driver, num_ranges: int) -> list[str]:
    """One line of the table."""
    ranges = Ranges.shuffled(num_ranges)
    arrays = [np.array(numbers) for numbers in (ranges.src, ranges.dst, ranges.lengths)]
    src = torch.zeros(num_ranges * 3, 1, dtype=torch.int64)
    dst = torch.zeros_like(src)

    def transfer(plan: TransferPlan) -> None:
        check_tables(plan, src, dst)
        native_refusal(src, dst, torch.version.hip)
        submit(plan, src, dst, driver, STREAM, 0)

    def plan_and_transfer() -> None:
        transfer(TransferPlan(ranges.src, ranges.dst, ranges.lengths))

    def copy_loop() -> None:
        for s, d, n in zip(ranges.src, ranges.dst, ranges.lengths, strict=True):
            dst[d : d + n].copy_(src[s : s + n])

    made = TransferPlan(*arrays)
    whole, loop = cost(plan_and_transfer, num_ranges), cost(copy_loop, num_ranges)
    times = (
        cost(lambda: TransferPlan(*arrays), num_ranges).best,
        cost(lambda: TransferPlan(ranges.src, ranges.dst, ranges.lengths), num_ranges).best,
        whole.best,
        whole.middle,
        cost(lambda: transfer(made), num_ranges).best,
        loop.best,
    )
    return [str(num_ranges), *(f"{t:.3f}" for t in times), f"{loop.best / whole.best:.0f}x"]


def report() -> tuple[str, bool]:
    """The text to print and keep, and whether the goal was met at every size."""
    with tempfile.TemporaryDirectory() as folder:
        extension = import_extension(compile_extension(Path(folder), "-O2"))
        fake = FakeDriver(compile_fake_driver(Path(folder) / "libfake.so"), extension)
        fake.knobs.idle = 1
        driver = fake.load()
        assert driver.path == "batch"
        head = machine(f"torch {torch.__version__}", f"numpy {np.__version__}")
        rows = [measure(driver, num_ranges) for num_ranges in NUM_RANGES]
    met = all(float(row[HEADER.index("all")]) < GOAL_US for row in rows)
    verdict = f"goal: all below {GOAL_US} us a range above 64 ranges: {'met' if met else 'NOT met'}"
    units = (
        "CPU microseconds a range, best of runs; all: lists planned and submitted; ratio: copy_ loop to all"
    )
    return f"{head}\n{units}\n\n{table(HEADER, rows)}\n\n{verdict}\n", met


def main() -> None:
    torch.set_num_threads(1)
    text, met = report()
    print(text, end="")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "batch_copy.txt").write_text(text)
    sys.exit(not met)


if __name__ == "__main__":
    main()
