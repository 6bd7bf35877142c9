"""Load over HTTP/1.1, from one event loop: a client that costs little, closed and open loops."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. seconds: to the last byte of the answer, from when it was due to be sent."""

    index: int
    status: int
    seconds: float
    body: bytes


class Connections:
    """Keep-alive connections to one server; each carries one request at a time."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return await self._exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self._exchange(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=2**20)
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }
        body = await reader.readexactly(int(headers["content-length"]))
        self._idle.append((reader, writer))
        return int(head[0].split()[1]), body


async def closed_loop(
    connections: Connections, bodies: Sequence[bytes], concurrency: int, seconds: float
) -> list[Sample]:
    """Always `concurrency` requests in flight, each sent when another was answered."""
    samples: list[Sample] = []
    indices = iter(range(len(bodies)))
    end = time.perf_counter() + seconds

    async def client() -> None:
        while (due := time.perf_counter()) < end and (index := next(indices, None)) is not None:
            samples.append(await _send(connections, index, bodies[index], due))

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return samples


async def open_loop(
    connections: Connections, bodies: Sequence[bytes], rate: float, seconds: float, rng: random.Random
) -> list[Sample]:
    """Requests come at random, `rate` a second on average, however long the others take."""
    requests: list[asyncio.Task[Sample]] = []
    due = time.perf_counter()
    end = due + seconds
    for index, body in enumerate(bodies):
        due += rng.expovariate(rate)
        if due > end:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        requests.append(asyncio.create_task(_send(connections, index, body, due)))
    return list(await asyncio.gather(*requests))


async def beside(
    work: Coroutine[Any, Any, list[Sample]],
    probe: Callable[[], Coroutine[Any, Any, object]],
    interval_s: float,
) -> tuple[list[Sample], list[float]]:
    """The result of `work`, and the seconds of `probe`, made every `interval_s` meanwhile."""
    task = asyncio.create_task(work)
    times = []
    while not task.done():
        start = time.perf_counter()
        await probe()
        times.append(time.perf_counter() - start)
        await asyncio.wait([task], timeout=interval_s)
    return task.result(), times


async def _send(connections: Connections, index: int, body: bytes, due: float) -> Sample:
    status, answer = await connections.post("/v1/embeddings", body)
    return Sample(index, status, time.perf_counter() - due, answer)
