"""One mode of `benchmarks.proxy_modes`, the one that the environment says: serves, measures, prints JSON.

python -m benchmarks.proxy_probe [--checks]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

from tests.cluster.server import free_ports

RESULT = "RESULT "
CONNECTIONS = 16
RATE_S, LATENCY_S, WARM_UP_S = 2.0, 1.5, 0.5
NUM_TRANSFERS = 20
TRANSFER_BYTES = 2 * 2**20
KINDS = ("nothing", "array", "bytes", "inline bytes")
MAX_ONGOING, MAX_QUEUED = 8, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", action="store_true")
    checks = parser.parse_args().checks
    with serve_application() as (port, replica_port):
        result = asyncio.run(check(port) if checks else measure(port, replica_port))
    print(RESULT + json.dumps(result))


@contextmanager
def serve_application() -> Iterator[tuple[int, int | None]]:
    """The application in a Ray of its own: the port of its proxy, and of its replica if that has one."""
    folder = tempfile.mkdtemp(prefix="epd-")
    port, replica_port, fallback_port, metrics_port, stats_port = free_ports(5)
    has_haproxy = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    # On a busy machine the proxies are not up within Serve's 5 s.
    settings = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_LOG_TO_STDERR": "0"}
    if has_haproxy:
        settings |= {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/ha/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/ha/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}/ha",
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/ha/server-state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/ha/metrics.sock",
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics_port),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(stats_port),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_port),
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replica_port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replica_port + 20),
        }
    os.environ.update(settings)
    import ray
    from ray import serve

    try:
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": 30})
        serve.run(make_application(limited=False), name="benchmark")
        yield port, replica_port if has_haproxy else None
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def make_application(limited: bool) -> Any:
    """A no-op ingress and a no-op deployment behind it. Pickled by value, so defined in here.

    limited: the ingress takes MAX_ONGOING requests and lets MAX_QUEUED wait.
    """
    import numpy as np
    from fastapi import FastAPI, Response
    from ray import serve
    from ray.serve.config import BackpressureConfig

    app = FastAPI()

    class Hop:
        def __init__(self) -> None:
            self._seen: dict[str, float] = {}

        async def noop(self, _payload: object = None) -> None:
            return None

        async def slow(self, name: str, seconds: float) -> None:
            self._seen[f"{name} started"] = time.time()
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self._seen[f"{name} cancelled"] = time.time()
                raise

        async def seen(self) -> dict[str, float]:
            return self._seen

    @serve.ingress(app)
    class Ingress:
        def __init__(self, hop: Any) -> None:
            self._hop = hop

        @app.get("/ping")
        async def ping(self) -> str:
            return "ok"

        @app.get("/hop")
        async def hop(self) -> str:
            await self._hop.noop.remote()
            return "ok"

        @app.get("/transfers")
        async def transfers(self) -> dict[str, float]:
            data = np.random.default_rng(0).integers(0, 256, TRANSFER_BYTES, np.uint8)
            payloads = {
                "nothing": None,
                "array": data,
                "bytes": data.tobytes(),
                "inline bytes": data.tobytes(),
            }
            return {kind: await self._time(kind, payload) for kind, payload in payloads.items()}

        async def _time(self, kind: str, payload: object) -> float:
            method = self._hop.options(method_name="noop", _by_reference=not kind.startswith("inline"))
            times = []
            for _ in range(NUM_TRANSFERS):
                start = time.perf_counter()
                await method.remote(payload)
                times.append((time.perf_counter() - start) * 1e3)
            return median(times)

        @app.get("/overloaded")
        async def overloaded(self) -> Response:
            return Response("full", 429, {"Retry-After": "1"})

        @app.get("/unavailable")
        async def unavailable(self) -> Response:
            return Response("gone", 503, {"Retry-After": "2"})

        @app.get("/slow")
        async def slow(self, name: str, seconds: float) -> str:
            await self._hop.slow.remote(name, seconds)
            return "done"

        @app.get("/seen")
        async def seen(self) -> dict[str, float]:
            return await self._hop.seen.remote()  # type: ignore[no-any-return]

    light = {"ray_actor_options": {"num_cpus": 0.1}}
    limits = {
        "max_ongoing_requests": MAX_ONGOING if limited else 256,
        "max_queued_requests": MAX_QUEUED if limited else -1,
        "backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1.5),
    }
    hop = serve.deployment(Hop, **light, max_ongoing_requests=256).bind()
    return serve.deployment(Ingress, **light, **limits).bind(hop)


async def measure(port: int, replica_port: int | None) -> dict[str, Any]:
    results: dict[str, Any] = {"proxy": await _rates(port)}
    if replica_port is not None:
        results["replica's port"] = await _rates(replica_port)
    _, _, body = await request(port, "/transfers")
    return results | {"transfers": json.loads(body)}


async def _rates(port: int) -> dict[str, float]:
    await _call_for(port, "/hop", WARM_UP_S)
    clients = (_call_for(port, "/ping", RATE_S) for _ in range(CONNECTIONS))
    ping = sum(map(len, await asyncio.gather(*clients))) / RATE_S
    clients = (_call_for(port, "/hop", RATE_S) for _ in range(CONNECTIONS))
    hop = sum(map(len, await asyncio.gather(*clients))) / RATE_S
    times = quantiles(await _call_for(port, "/hop", LATENCY_S), n=100)
    return {"ping": ping, "hop": hop, "p50": times[49] * 1e3, "p99": times[98] * 1e3}


async def _call_for(port: int, path: str, seconds: float) -> list[float]:
    """Seconds of each request, made one after the other on one connection."""
    client = Client(port)
    times = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        status, _, _ = await client.get(path)
        assert status == 200, status
        times.append(time.perf_counter() - start)
    client.close()
    return times


async def request(port: int, path: str) -> tuple[int, dict[str, str], bytes]:
    client = Client(port)
    answer = await client.get(path)
    client.close()
    return answer


class Client:
    """The least of an HTTP/1.1 client: one connection, made anew when the server says that it closes it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """The answer's status, headers and body; no body if that comes in chunks."""
        reader = await self.send(path)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        lines = (line.partition(":") for line in head[1:])
        headers = {name.lower(): value.strip() for name, _, value in lines}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            self.close()
        return int(head[0].split()[1]), headers, body

    async def send(self, path: str) -> asyncio.StreamReader:
        """Asks, and leaves the answer to be read."""
        if self._connection is None:
            self._connection = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._connection
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return reader

    def close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None


async def check(port: int) -> dict[str, str]:
    """What the mode does when a client leaves, when requests are refused, and when it is taken down."""
    from ray import serve

    found = {"redeploying under load": await _outcomes_while(port, _redeploy)}
    for path in ("/overloaded", "/unavailable"):
        status, headers, _ = await request(port, path)
        found[path[1:]] = f"{status}, Retry-After {headers.get('retry-after')}"
    leaver = Client(port)
    await leaver.send("/slow?name=left&seconds=20")
    await _seen(port, "left started")
    left = time.time()
    leaver.close()
    found["client leaves: 2nd hop cancelled"] = f"after {await _seen(port, 'left cancelled') - left:.2f} s"
    crowd = [request(port, f"/slow?name=crowd-{i}&seconds=2") for i in range(2 * (MAX_ONGOING + MAX_QUEUED))]
    answers = Counter(
        f"{status}" if status == 200 else f"{status} (Retry-After {headers.get('retry-after')})"
        for status, headers, _ in await asyncio.gather(*crowd)
    )
    found["twice as many as fit"] = ", ".join(f"{num} x {answer}" for answer, num in sorted(answers.items()))
    in_flight = asyncio.create_task(request(port, "/slow?name=late&seconds=3"))
    await _seen(port, "late started")
    start = time.time()
    await asyncio.to_thread(serve.delete, "benchmark")
    found["deleting the application"] = f"{time.time() - start:.0f} s"
    found["request in flight meanwhile"] = str((await in_flight)[0])
    return found


def _redeploy() -> None:
    from ray import serve

    serve.run(make_application(limited=True), name="benchmark")


async def _outcomes_while(port: int, change: Callable[[], None]) -> str:
    """What became of the requests of a few clients while something changes, and a second more."""
    outcomes: Counter[str] = Counter()
    over = asyncio.Event()

    async def keep_asking() -> None:
        client = Client(port)
        while not over.is_set():
            try:
                status, _, _ = await client.get("/hop")
                outcomes[str(status)] += 1
            except (ConnectionError, asyncio.IncompleteReadError):
                outcomes["no answer"] += 1
                client.close()
        client.close()

    clients = [asyncio.create_task(keep_asking()) for _ in range(MAX_ONGOING // 2)]
    await asyncio.to_thread(change)
    await asyncio.sleep(1)
    over.set()
    await asyncio.gather(*clients)
    return ", ".join(f"{num} x {outcome}" for outcome, num in sorted(outcomes.items()))


async def _seen(port: int, event: str) -> float:
    """When the ingress saw it; waits for it."""
    async with asyncio.timeout(15):
        while True:
            _, _, body = await request(port, "/seen")
            if event in (seen := json.loads(body)):
                return float(seen[event])
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    main()
