"""The running service under load over HTTP, beside the same items by packed forwards without a service.

    python -m benchmarks.serve_load [--seconds 5] [--concurrency 16] [--workloads "text, short" ...]

Starts configs/epd.yaml, one replica of each stage, every process with one compute thread. For each workload:
a closed loop, then an open one (Poisson) at `--rate-share` of the rate that the closed loop reached, then the
closed loop's items offline. The last workload is run once more with many items in each request. The client
runs on the same CPUs. Keeps what it printed in benchmarks/results/serve_load.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.http_load import Connections, Sample, beside, closed_loop, open_loop
from benchmarks.load_items import WORKLOADS, Item, bodies
from benchmarks.offline import Offline
from benchmarks.report import RESULTS, load_average, machine, table
from epd.deployments.settings import Settings
from tests.cluster.server import Server

THREADS = 1
MAX_ITEMS_PER_S = 300  # items made beforehand for each second of a loop
HEALTH_INTERVAL_S = 0.2
PROCESSES = ("Ingress", "Encoder", "Embedder", "MooncakeStore", "Proxy")
HEADER = (
    *("workload", "loop", "items", "items/s", "p50 ms", "p99 ms", "CPU ms/item", "encodes/picture"),
    *("rows local", "rows store", "health p50", "health max", "loop block"),
)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a stretch of time cost the server: CPU ticks by kind of process, and growth of its counters."""

    ticks: Counter[str]
    counters: Counter[str]
    loop_block_ms: float

    def cpu_ms(self, *kinds: str) -> float:
        """Of these kinds of processes; of all when none is named."""
        ticks = sum(self.ticks[kind] for kind in kinds or self.ticks)
        return ticks / os.sysconf("SC_CLK_TCK") * 1e3


class Meter:
    """Reads a server's CPU time from /proc and its counters from /info."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._kinds = {pid: _kind(pid) for pid in server.pids()}

    @contextmanager
    def measure(self) -> Iterator[list[Usage]]:
        """The list has the usage of what was enclosed, once that has ended."""
        ticks, (counters, _), usage = self._ticks(), self._counters(), list[Usage]()
        yield usage
        grown, (now, block) = self._ticks() - ticks, self._counters()
        usage.append(Usage(grown, now - counters, block))

    def _ticks(self) -> Counter[str]:
        spent: Counter[str] = Counter()
        for pid, kind in self._kinds.items():
            stat = Path(f"/proc/{pid}/stat")
            if stat.exists():
                fields = stat.read_text().rpartition(")")[2].split()
                spent[kind] += int(fields[11]) + int(fields[12])  # user and system time
        return spent

    def _counters(self) -> tuple[Counter[str], float]:
        info: dict[str, Any] = self._server.get("/info").raise_for_status().json()
        (encoder,), (embedder,) = info["stages"]["encoder"], info["stages"]["embedder"]
        counters = Counter(embedder["cache"]) + Counter(encodes=encoder["encodes"])
        return counters, info["ingress"]["loop_block_ms"]


@dataclass(slots=True)
class Bench:
    """One server, and all that is measured on it."""

    server: Server
    offline: Offline
    options: argparse.Namespace
    rows: list[list[str]] = field(default_factory=list)
    costs: list[list[str]] = field(default_factory=list)

    def run(self, workload: str, per_request: int) -> None:
        """Both loops and the offline forward of one workload, asked for with so many items in a request."""
        name = workload if per_request == 1 else f"{workload}, {per_request} a request"
        meter, rng = Meter(self.server), random.Random(f"{self.options.seed}/{name}")
        supply = WORKLOADS[workload](rng)
        count = int(self.options.seconds * MAX_ITEMS_PER_S) // per_request * per_request
        items, later = list(islice(supply, count)), list(islice(supply, count))

        with meter.measure() as usage:
            samples, elapsed, health = asyncio.run(self._closed(bodies(items, per_request)))
        asked = _asked(items, samples, per_request)
        self.rows.append(_row(name, "closed", asked, samples, elapsed, health, usage[0]))
        self._add_costs(name, len(asked), usage[0])
        rate = self.options.rate_share * len(samples) / elapsed
        with meter.measure() as usage:
            answers, elapsed, health = asyncio.run(self._open(bodies(later, per_request), rate, rng))
        loop = f"open, {rate:.0f}/s"
        self.rows.append(
            _row("", loop, _asked(later, answers, per_request), answers, elapsed, health, usage[0])
        )
        self._run_offline(asked, samples)

    async def _closed(self, requests: Sequence[bytes]) -> tuple[list[Sample], float, list[float]]:
        connections = Connections(self.server.url)
        start = time.perf_counter()
        work = closed_loop(connections, requests, self.options.concurrency, self.options.seconds)
        samples, health = await beside(work, lambda: connections.get("/health"), HEALTH_INTERVAL_S)
        connections.close()
        return samples, time.perf_counter() - start, health

    async def _open(
        self, requests: Sequence[bytes], rate: float, rng: random.Random
    ) -> tuple[list[Sample], float, list[float]]:
        connections = Connections(self.server.url)
        start = time.perf_counter()
        work = open_loop(connections, requests, rate, self.options.seconds, rng)
        samples, health = await beside(work, lambda: connections.get("/health"), HEALTH_INTERVAL_S)
        connections.close()
        return samples, time.perf_counter() - start, health

    def _run_offline(self, asked: Sequence[Item], samples: Sequence[Sample]) -> None:
        """The items that the closed loop had answered, and a check that both have the same vectors."""
        wall, cpu = time.perf_counter(), time.process_time()
        vectors = self.offline.embed(asked)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        off = float(np.abs(vectors - np.concatenate([_vectors(sample.body) for sample in samples])).max())
        assert off < 1e-5, f"the service's vectors differ by {off} from those of the packed forward"
        cost = f"{cpu / len(asked) * 1e3:.2f}"
        self.rows.append(
            ["", "offline", str(len(asked)), f"{len(asked) / wall:.0f}", "", "", cost, *[""] * 6]
        )
        self.costs[-1] += [cost]

    def _add_costs(self, name: str, num_items: int, usage: Usage) -> None:
        costs = [*(usage.cpu_ms(kind) for kind in (*PROCESSES, "")), usage.cpu_ms()]
        self.costs.append([name, *(f"{cost / num_items:.2f}" for cost in costs)])


def _row(
    name: str,
    loop: str,
    asked: Sequence[Item],
    samples: Sequence[Sample],
    elapsed: float,
    health: Sequence[float],
    usage: Usage,
) -> list[str]:
    statuses = Counter(sample.status for sample in samples)
    assert set(statuses) == {200}, f"{name}, {loop}: {statuses}"
    p50, p99 = np.percentile([sample.seconds * 1e3 for sample in samples], [50, 99])
    num_pictures = sum(item.picture is not None for item in asked)
    counters = usage.counters
    local, stored = counters["hits_local"] + counters["hits_joined"], counters["hits_store"]
    return [
        *(name, loop, str(len(asked)), f"{len(asked) / elapsed:.0f}", f"{p50:.0f}", f"{p99:.0f}"),
        f"{usage.cpu_ms() / len(asked):.2f}",
        *(
            f"{part / num_pictures:.2f}" if num_pictures else ""
            for part in (counters["encodes"], local, stored)
        ),
        *(f"{float(value) * 1e3:.0f}" for value in (np.median(health), max(health))),
        f"{usage.loop_block_ms:.0f}",
    ]


def _asked(items: Sequence[Item], samples: Sequence[Sample], per_request: int) -> list[Item]:
    """The items of the requests that were sent, in the samples' order."""
    starts = [sample.index * per_request for sample in samples]
    return [item for start in starts for item in items[start : start + per_request]]


def _vectors(body: bytes) -> npt.NDArray[np.float32]:
    """`[num_items, dimensions]`"""
    data = json.loads(body)["data"]
    return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])


def _kind(pid: int) -> str:
    """Which of PROCESSES it is; otherwise "": Ray's and Mooncake's own."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return next(
        (
            kind
            for kind in PROCESSES
            if f"ray::ServeReplica:epd:{kind}" in command or f"ray::{kind}" in command
        ),
        "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each loop")
    parser.add_argument("--concurrency", type=int, default=16, help="of the closed loop")
    parser.add_argument(
        "--rate-share", type=float, default=0.7, help="of the closed loop's rate, in the open one"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--per-request", type=int, default=16, help="items of a request, in one more round of the last"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    torch.set_num_threads(THREADS)
    about = machine(
        f"{os.cpu_count()} CPUs",
        f"torch {torch.__version__}, {THREADS} thread per process",
        f"model demo, closed loop of {options.concurrency}",
    )
    assert Settings().cpu_threads == THREADS
    with Server(start_timeout_s=300) as server:
        bench = Bench(server, Offline("demo"), options)
        for workload in options.workloads:
            bench.run(workload, 1)
        bench.run(options.workloads[-1], options.per_request)
    costs = table(("CPU ms/item", *PROCESSES, "Ray, Mooncake", "all", "offline"), bench.costs)
    text = f"{about}, {load_average()} at the end\n\n{table(HEADER, bench.rows)}\n\n{costs}\n"
    print(text)
    (RESULTS / "serve_load.txt").write_text(text)


if __name__ == "__main__":
    main()
