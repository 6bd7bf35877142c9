"""Fragmented copies between pinned host memory and a CUDA device; for `benchmarks/gpu.py` to call, or alone:

    python -m benchmarks.gpu_copy

`check` compares every path with plain slicing. `run` times 8 to 512 MiB in shuffled fragments of 64 KiB, 256
KiB and 1 MiB, and the layouts that batching cannot help, against a loop of `copy_` and against one contiguous
copy of the same bytes. About a minute in all. Keeps what it printed in benchmarks/results/gpu_copy.txt.

Never executed on a device: no machine with one was at hand.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal

import torch

from benchmarks.report import RESULTS, machine, table
from epd.kernels.batch_copy import default_driver
from epd.kernels.transfer import TransferPlan, batch_copy_status, run_plan, submit, transfer_ranges

MIB = 1 << 20
ROW_BYTES = 16 * 1024
WIDTH = ROW_BYTES // 2  # bfloat16
TOTALS_MIB = (8, 32, 128, 512)
FRAGMENTS_KIB = (64, 256, 1024)
MIDDLE_KIB = 256
LOOP_GOALS = {"H2D": 1.43, "D2H": 1.48}
SINGLE_COPY_GOAL = 0.95
NO_SLOWER = 0.97
"""Least ratio that counts as no slower, for what one run differs from the next."""

Layout = Literal["shuffled", "contiguous", "single"]
HEADER = (
    "",
    "MiB",
    "KiB",
    "path",
    "GB/s",
    "planned",
    "any order",
    "per range",
    "loop",
    "one copy",
    "to loop",
    "share",
)


LEGEND = """\
Columns from GB/s to one copy: GB/s from the call to the end of the copies, medians.
GB/s: transfer_ranges, planning included; planned: its plan reused; any order: with source access order any;
per range: one cuMemcpyAsync each; loop: one copy_ each; one copy: the same bytes in one contiguous copy_.
to loop: transfer_ranges against the loop; share: of one copy's bandwidth."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to cut `total_mib` into fragments; `fragment_kib` is the whole for a single range."""

    direction: Literal["H2D", "D2H"]
    layout: Layout
    total_mib: int
    fragment_kib: int

    @property
    def num_rows(self) -> int:
        return self.total_mib * MIB // ROW_BYTES

    def ranges(self) -> tuple[list[int], list[int], list[int]]:
        """Source starts, destination starts and lengths, in rows; destinations are in order."""
        length = self.fragment_kib * 1024 // ROW_BYTES
        starts = list(range(0, self.num_rows, length))
        src_starts = random.Random(7).sample(starts, len(starts)) if self.layout == "shuffled" else starts
        return src_starts, starts, [length] * len(starts)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds from the call to the end of the copies, medians."""

    path: str
    ours: float
    planned: float
    any_order: float
    per_range: float
    loop: float
    one_copy: float

    @property
    def to_loop(self) -> float:
        """How many times faster than the loop of copy_."""
        return self.loop / self.ours

    @property
    def share(self) -> float:
        """Share of one contiguous copy's bandwidth."""
        return self.one_copy / self.ours


def new_stream() -> torch.cuda.Stream:
    """A stream of its own: only there are batches to be had."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Tables:
    """The largest case's rows on both sides, allocated once, and the stream that copies."""

    def __init__(self, total_mib: int) -> None:
        num_rows = total_mib * MIB // ROW_BYTES
        self.host = torch.zeros(num_rows, WIDTH, dtype=torch.bfloat16, pin_memory=True)
        self.device = torch.zeros(num_rows, WIDTH, dtype=torch.bfloat16, device="cuda")
        self.stream = new_stream()
        torch.cuda.synchronize()

    def sides(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and destination of `case`."""
        host, device = self.host[: case.num_rows], self.device[: case.num_rows]
        return (host, device) if case.direction == "H2D" else (device, host)


def copy_loop(src: torch.Tensor, dst: torch.Tensor, ranges: tuple[list[int], list[int], list[int]]) -> None:
    """What anybody would write: one non-blocking copy_ per range, on the current stream."""
    for s, d, n in zip(*ranges, strict=True):
        dst[d : d + n].copy_(src[s : s + n], non_blocking=True)


def ways(case: Case, tables: Tables) -> list[Callable[[], object]]:
    """What is timed, in the order of the fields of `Times`; each only submits."""
    src, dst = tables.sides(case)
    ranges, stream = case.ranges(), tables.stream
    plan = TransferPlan(*ranges)
    handle, device, driver = stream.cuda_stream, torch.cuda.current_device(), default_driver()
    return [
        lambda: transfer_ranges(src, dst, *ranges, stream),
        lambda: run_plan(plan, src, dst, stream),
        partial(submit, plan, src, dst, driver, handle, device, any_order=True),
        lambda: run_plan(plan, src, dst, stream, force="ranges"),
        lambda: copy_loop(src, dst, ranges),
        lambda: dst.copy_(src, non_blocking=True),
    ]


def measure(case: Case, tables: Tables) -> Times:
    """Times every way in turn, several rounds, so that drifts meet all alike."""
    repeats = 20 if case.total_mib <= 32 else 7
    calls = ways(case, tables)
    seconds: list[list[float]] = [[] for _ in calls]
    with torch.cuda.stream(tables.stream):
        path = run_plan(TransferPlan(*case.ranges()), *tables.sides(case), tables.stream).path
        for round_ in range(repeats + 2):
            for call, times in zip(calls, seconds, strict=True):
                tables.stream.synchronize()
                begin = time.perf_counter()
                call()
                tables.stream.synchronize()
                if round_ >= 2:
                    times.append(time.perf_counter() - begin)
    return Times(path, *(median(times) for times in seconds))


def row(case: Case, times: Times) -> list[str]:
    """One line of the table: bandwidths in GB/s, then the two ratios."""
    nbytes = case.total_mib * MIB
    measured = (times.ours, times.planned, times.any_order, times.per_range, times.loop, times.one_copy)
    return [
        f"{case.direction} {case.layout}",
        str(case.total_mib),
        str(case.fragment_kib),
        times.path,
        *(f"{nbytes / seconds / 1e9:.1f}" for seconds in measured),
        f"{times.to_loop:.2f}x",
        f"{times.share:.1%}",
    ]


def cases(totals_mib: Sequence[int] = TOTALS_MIB) -> list[Case]:
    """Everything that is timed."""
    found: list[Case] = []
    for direction in ("H2D", "D2H"):
        for total in totals_mib:
            found += [Case(direction, "shuffled", total, kib) for kib in FRAGMENTS_KIB]
            found.append(Case(direction, "contiguous", total, MIDDLE_KIB))
            found.append(Case(direction, "single", total, total * 1024))
    return found


def verdicts(measured: Sequence[tuple[Case, Times]]) -> list[str]:
    """One line for each goal and size, those not met marked."""
    lines = []
    for case, times in measured:
        name = f"{case.direction} {case.layout} {case.total_mib} MiB"
        if case.layout != "shuffled":
            goals = [("to the loop", times.to_loop, NO_SLOWER)]
        elif case.fragment_kib == MIDDLE_KIB:
            goals = [
                ("to the loop", times.to_loop, LOOP_GOALS[case.direction]),
                ("of one copy", times.share, SINGLE_COPY_GOAL),
            ]
        else:
            continue
        for what, value, goal in goals:
            lines.append(
                f"{name}: {value:.2f} {what}, goal {goal:.2f}: {'met' if value >= goal else 'NOT met'}"
            )
    return lines


def run(totals_mib: Sequence[int] = TOTALS_MIB) -> str:
    """Times all cases; the table and, line by line, the goals."""
    head = machine(torch.cuda.get_device_name(), f"torch {torch.__version__}", f"CUDA {torch.version.cuda}")
    tables = Tables(max(totals_mib))
    measured = [(case, measure(case, tables)) for case in cases(totals_mib)]
    lines = table(HEADER, [row(case, times) for case, times in measured])
    goals = "\n".join(verdicts(measured))
    return "\n\n".join([f"{head}\n{batch_copy_status()}", LEGEND, lines, goals]) + "\n"


def check() -> str:
    """Compares every path, stream and direction with plain slicing. Raises AssertionError at a difference."""
    generator = random.Random(3)
    compared = 0
    for direction in ("H2D", "D2H"):
        for num_rows, longest in ((64, 3), (3000, 1), (900, 40)):
            for force in (None, "ranges", "copy_"):
                for stream in (new_stream(), torch.cuda.default_stream()):
                    _check_one(direction, num_rows, longest, force, stream, generator)
                    compared += 1
    return f"{compared} transfers equal plain slicing; {batch_copy_status()}"


def _check_one(
    direction: str,
    num_rows: int,
    longest: int,
    force: Literal["ranges", "copy_"] | None,
    stream: torch.cuda.Stream,
    generator: random.Random,
) -> None:
    lengths: list[int] = []
    while sum(lengths) + longest <= num_rows:
        lengths.append(generator.randint(0, longest))
    starts = []
    for _ in range(2):
        side = [0] * len(lengths)
        at = 0
        for i in generator.sample(range(len(lengths)), len(lengths)):
            side[i] = at
            at += lengths[i]
        starts.append(side)
    host = torch.randint(-128, 128, (num_rows, 37), dtype=torch.int8)
    empty = torch.full_like(host, -1)
    src = host.cuda() if direction == "D2H" else host.pin_memory()
    dst = empty.pin_memory() if direction == "D2H" else empty.cuda()
    expected = empty.clone()
    for s, d, n in zip(*starts, lengths, strict=True):
        expected[d : d + n] = host[s : s + n]
    torch.cuda.synchronize()
    copy = run_plan(TransferPlan(starts[0], starts[1], lengths), src, dst, stream, force=force)
    copy.wait()
    assert torch.equal(dst.cpu(), expected), f"{direction} by {copy.path}, {num_rows} rows: rows differ"


def main() -> None:
    """Checks, times, prints and keeps; exit 1 when a goal is not met."""
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    print(check())
    text = run()
    print(text, end="")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "gpu_copy.txt").write_text(text)
    if "NOT met" in text:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
