"""Where the milliseconds of one request go, alone and among others: short text, known picture, new picture.

    python -m benchmarks.request_profile [--model 0.6b]

Starts configs/epd.yaml, behind Serve's own proxy and then behind HAProxy, and sends requests of one item, one
after the other: first alone, then while a closed loop of 8 sends mixed items. What Ingress and the stages
measured comes from `X-EPD-Timing`. `outside` is what the client waited beyond Ingress's total: HTTP, proxy,
JSON. `hops` is what of that total no step accounts for: calls between stages. `floor` is the packed forward
of the item in this process, with nothing around it, one thread, measured between the two. Medians.
Keeps what it printed in benchmarks/results/request_profile.txt, or request_profile_0.6b.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from threading import Thread
from unittest.mock import patch
from urllib.parse import urlsplit

import torch

from benchmarks.http_load import Connections, closed_loop
from benchmarks.load_items import Item, Items, bodies, mixed, new_pictures, short_texts
from benchmarks.offline import Offline
from benchmarks.report import RESULTS, load_average, machine, table
from benchmarks.serve_load import write_06b
from epd.deployments.replica import HAPROXY_FLAGS
from tests.cluster.server import Server

CONCURRENCY = 8
PROXIES: dict[str, dict[str, str]] = {"Serve's proxy": {}, "HAProxy": HAPROXY_FLAGS}
STEPS = (
    *("client", "outside", "prepare", "lookup"),
    *("encoder_decode", "encoder_queue", "encoder_encode", "encoder_copy", "encoder_publish"),
    *("embedder_fetch", "embedder_queue", "embedder_prefill", "hops", "floor"),
)
Timings = dict[str, float]


def kinds(rng: random.Random, count: int) -> dict[str, list[Item]]:
    """Items to profile, none of which the loop beside them sends."""
    picture = next(new_pictures(rng))
    return {
        "short text": list(islice(short_texts(rng), count)),
        "known picture": [picture] * count,
        "new picture": list(islice(new_pictures(rng), count)),
    }


def ask(server: Server, items: Sequence[Item]) -> list[Timings]:
    """One request for each item, on one connection: milliseconds of each step."""
    address = urlsplit(server.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
    found = []
    for body in bodies(items, 1):
        started = time.perf_counter()
        connection.request(
            "POST", "/v1/embeddings", body, {"Content-Type": "application/json", "X-EPD-Timing": "1"}
        )
        answer = connection.getresponse()
        answer.read()
        client = (time.perf_counter() - started) * 1e3
        assert answer.status == 200, answer.status
        steps = dict(map(_step, answer.headers["X-EPD-Timing"].split(", ")))
        total = steps.pop("total")
        inside = sum(steps.values())
        found.append({"client": client, "outside": client - total, "hops": total - inside, **steps})
    connection.close()
    return found


def _step(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(";dur=")
    return name, float(milliseconds)


def floor(offline: Offline, items: Sequence[Item]) -> Timings:
    """The items' forwards one by one; a known picture's rows are not computed again."""
    taken = []
    rows: dict[bytes, torch.Tensor] = {}
    for item in items:
        started = time.perf_counter()
        offline.embed([item], rows)
        taken.append((time.perf_counter() - started) * 1e3)
    return {"floor": median(taken)}


@contextmanager
def load(server: Server, items: Items) -> Iterator[None]:
    """A closed loop of mixed items beside what is enclosed, from when its first answer has come."""
    stop = False

    async def run() -> None:
        connections = Connections(server.url)
        while not stop:
            samples = await closed_loop(connections, bodies(list(islice(items, 500)), 1), CONCURRENCY, 2.0)
            assert {sample.status for sample in samples} == {200}
        connections.close()

    asyncio.run(closed_loop_once(server, items))
    thread = Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield
    finally:
        stop = True
        thread.join()


async def closed_loop_once(server: Server, items: Items) -> None:
    """Warms the paths that the loop uses."""
    connections = Connections(server.url)
    await closed_loop(connections, bodies(list(islice(items, 32)), 1), CONCURRENCY, 60.0)
    connections.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("demo", "0.6b"), default="demo")
    parser.add_argument("--count", type=int, default=60, help="requests of each kind")
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    about = machine(f"{os.cpu_count()} CPUs", f"torch {torch.__version__}", f"model {options.model}")
    cases: list[tuple[str, Timings]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = "demo" if options.model == "demo" else str(write_06b(Path(folder)))
        offline = Offline(path)
        for proxy, flags in PROXIES.items():
            with (
                patch.dict(os.environ, flags),
                Server({"model": {"path": path}}, start_timeout_s=300) as server,
            ):
                cases += profile(server, offline, proxy, options.count)
    rows = [
        [name, *(f"{times[step]:.2f}" if step in times else "" for step in STEPS)] for name, times in cases
    ]
    header = ("milliseconds", *(step.replace("_", " ") for step in STEPS))
    text = f"{about}, {load_average()} at the end\n\n{table(header, rows)}\n"
    print(text)
    name = "request_profile" if options.model == "demo" else f"request_profile_{options.model}"
    (RESULTS / f"{name}.txt").write_text(text)


def profile(server: Server, offline: Offline, proxy: str, count: int) -> list[tuple[str, Timings]]:
    """Each kind of request alone, then each amid others."""
    rng = random.Random(0)
    cases = []
    asyncio.run(closed_loop_once(server, mixed(rng)))
    for name, items in kinds(rng, count + 1).items():
        ask(server, items[:1])  # the first makes the known picture known
        alone = _medians(ask(server, items[1:]))
        cases.append((f"{proxy}, alone: {name}", alone | floor(offline, items)))
    with load(server, mixed(random.Random(1))):
        for name, items in kinds(rng, count + 1).items():
            ask(server, items[:1])
            cases.append((f"{proxy}, loaded: {name}", _medians(ask(server, items[1:]))))
    return cases


def _medians(found: Sequence[Timings]) -> Timings:
    steps = {step: None for timings in found for step in timings}
    return {step: median(timings.get(step, 0.0) for timings in found) for step in steps}


if __name__ == "__main__":
    main()
