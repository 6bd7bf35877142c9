"""The running service under load over HTTP, beside the same items by packed forwards without a service.

    python -m benchmarks.serve_load [--model 0.6b] [--seconds 5] [--workloads "text, short" ...]

Starts configs/epd.yaml, one replica of each stage, every process with one compute thread. For each workload:
a closed loop, then an open one (Poisson) at `--rate-share` of the rate that the closed loop reached, then the
closed loop's items offline. The last workload is run once more with many items in each request. The client
runs on the same CPUs. Rows are counted per picture asked for: found in the Embedder's pool, read from the
store, or sent by the Encoder directly.

Models: the demo checkpoint, whose forward costs next to nothing, so that the service's own cost shows; and
random weights (float32) in the shape of Qwen3-Embedding-0.6B with a vision tower of ViT-B's shape, which the
goals are for: CPU time at most 1.15 times, throughput at least 0.85 times that of offline.
Keeps what it printed in benchmarks/results/serve_load.txt, or serve_load_0.6b.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import tempfile
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
from benchmarks.load_items import WORDS, WORKLOADS, Item, bodies
from benchmarks.offline import Offline
from benchmarks.report import RESULTS, load_average, machine, table
from benchmarks.shapes import SHAPE_06B
from epd.demo.checkpoint_format import default_corpus, write_checkpoint
from epd.deployments.settings import Settings
from tests.cluster.server import Server

THREADS = 1
GOAL_CPU, GOAL_THROUGHPUT = 1.15, 0.85
VISION_B = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [3, 6, 9],
}
MAX_ITEMS_PER_S = 300  # items made beforehand for each second of a loop
HEALTH_INTERVAL_S = 1.0
IDLE_S = 10.0
PROCESSES = ("Ingress", "Encoder", "Embedder", "MooncakeStore", "Proxy")
HEADER = (
    *("workload", "loop", "items", "items/s", "p50 ms", "p99 ms", "CPU ms/item", "encodes/picture"),
    *("rows local", "store", "direct", "/health p50", "max ms", "loop block ms"),
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
    about: str
    rows: list[list[str]] = field(default_factory=list)
    costs: list[list[str]] = field(default_factory=list)
    idle_ms: float = 0.0
    ratios: list[list[str]] = field(default_factory=list)

    def measure_idle(self) -> None:
        """What the server costs in each second in which nobody asks for anything."""
        with Meter(self.server).measure() as usage:
            time.sleep(IDLE_S)
        self.idle_ms = usage[0].cpu_ms() / IDLE_S
        costs = [*(usage[0].cpu_ms(kind) for kind in (*PROCESSES, "")), usage[0].cpu_ms()]
        self.costs.append(["idle, per second", *(f"{cost / IDLE_S:.2f}" for cost in costs), ""])

    def run(self, workload: str, per_request: int) -> None:
        """Both loops and the offline forward of one workload, asked for with so many items in a request."""
        name = workload if per_request == 1 else f"{workload}, {per_request} a request"
        meter, rng = Meter(self.server), random.Random(f"{self.options.seed}/{name}")
        supply = WORKLOADS[workload](rng)
        count = int(self.options.seconds * MAX_ITEMS_PER_S) // per_request * per_request
        items, later = list(islice(supply, count)), list(islice(supply, count))

        with meter.measure() as usage:
            samples, elapsed, health = asyncio.run(self._closed(bodies(items, per_request)))
        asked, closed = _asked(items, samples, per_request), (elapsed, usage[0].cpu_ms() / 1e3)
        self.rows.append(_row(name, "closed", asked, samples, elapsed, health, usage[0]))
        self._add_costs(name, len(asked), usage[0])
        rate = self.options.rate_share * len(samples) / elapsed
        with meter.measure() as usage:
            answers, elapsed, health = asyncio.run(self._open(bodies(later, per_request), rate, rng))
        loop = f"open, {rate:.0f}/s"
        self.rows.append(
            _row("", loop, _asked(later, answers, per_request), answers, elapsed, health, usage[0])
        )
        self._run_offline(name, asked, samples, closed)

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

    def _run_offline(
        self, name: str, asked: Sequence[Item], samples: Sequence[Sample], closed: tuple[float, float]
    ) -> None:
        """The items that the closed loop answered, in its wall and CPU seconds; vectors must be equal."""
        wall, cpu = time.perf_counter(), time.process_time()
        vectors = self.offline.embed(asked)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        off = float(np.abs(vectors - np.concatenate([_vectors(sample.body) for sample in samples])).max())
        assert off < 1e-5, f"the service's vectors differ by {off} from those of the packed forward"
        cost = f"{cpu / len(asked) * 1e3:.2f}"
        self.rows.append(
            ["", "offline", str(len(asked)), f"{len(asked) / wall:.0f}", "", "", cost, *[""] * 7]
        )
        self.costs[-1] += [cost]
        elapsed, spent = closed
        throughput, ratio, net = wall / elapsed, spent / cpu, (spent - self.idle_ms * elapsed / 1e3) / cpu
        goals = "met" if ratio <= GOAL_CPU and throughput >= GOAL_THROUGHPUT else "missed"
        self.ratios.append([name, f"{throughput:.2f}", f"{ratio:.2f}", f"{net:.2f}", goals])

    def report(self) -> str:
        """What was measured so far."""
        costs = table(("CPU ms/item", *PROCESSES, "Ray, Mooncake", "all", "offline"), self.costs)
        ratios = table(("closed loop to offline", "items/s", "CPU", "CPU less idle", "goals"), self.ratios)
        about = f"{self.about}, {load_average()} at the end"
        return f"{about}\n\n{table(HEADER, self.rows)}\n\n{costs}\n\n{ratios}\n"

    def keep(self) -> None:
        name = "serve_load" if self.options.model == "demo" else f"serve_load_{self.options.model}"
        (RESULTS / f"{name}.txt").write_text(self.report())

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
    parts = (counters["encodes"], local, stored, counters["fills"])
    return [
        *(name, loop, str(len(asked)), f"{len(asked) / elapsed:.0f}", f"{p50:.0f}", f"{p99:.0f}"),
        f"{usage.cpu_ms() / len(asked):.2f}",
        *(f"{part / num_pictures:.2f}" if num_pictures else "" for part in parts),
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
    parser.add_argument("--model", choices=("demo", "0.6b"), default="demo")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each loop")
    parser.add_argument("--concurrency", type=int, default=16, help="of the closed loop")
    parser.add_argument(
        "--rate-share", type=float, default=0.7, help="of the closed loop's rate, in the open one"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--per-request", type=int, default=8, help="items of a request, in one more round of the last"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    torch.set_num_threads(THREADS)
    about = machine(
        f"{os.cpu_count()} CPUs",
        f"torch {torch.__version__}, {THREADS} thread per process",
        f"model {options.model}, closed loop of {options.concurrency}",
    )
    assert Settings().cpu_threads == THREADS
    with tempfile.TemporaryDirectory() as folder:
        path = "demo" if options.model == "demo" else str(write_06b(Path(folder)))
        with Server({"model": {"path": path}}, start_timeout_s=300) as server:
            bench = Bench(server, Offline(path), options, about)
            bench.measure_idle()
            for workload in options.workloads:
                bench.run(workload, 1)
                bench.keep()
            bench.run(options.workloads[-1], options.per_request)
            bench.keep()
    print(bench.report())


def write_06b(folder: Path) -> Path:
    """A checkpoint of SHAPE_06B and VISION_B with random weights; returns its folder."""
    corpus = [*default_corpus(), *(" ".join(WORDS) for _ in range(20))]
    return write_checkpoint(folder, text=SHAPE_06B, vision=VISION_B, corpus=corpus)


if __name__ == "__main__":
    main()
