"""Many requests at once against a running server, what they must be answered, and calm afterwards."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.cluster.server import Server, wait_until
from tests.oracle import Oracle, assert_same

Vector = npt.NDArray[np.float32]
Item = tuple[str | bytes, ...]
"""The parts of one item in order: texts, and pictures as the bytes of a file."""

TIMEOUT_S = 120.0

# About 1820 tokens of the demo model.
LONG_TEXT = "red circle " * 900

T = TypeVar("T")


def pictures(count: int, seed: int) -> list[bytes]:
    """PNGs of 96 x 96 pixels, 9 tokens each for the demo model; those of different seeds share nothing."""
    return [_picture(random.Random(f"{seed}/{index}")) for index in range(count)]


def _picture(rng: random.Random) -> bytes:
    coarse = Image.frombytes("RGB", (6, 6), rng.randbytes(108))
    buffer = BytesIO()
    coarse.resize((96, 96), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class Answer:
    """vectors: of a 200, one per item; empty for every other status."""

    status: int
    vectors: tuple[Vector, ...]
    headers: Mapping[str, str]
    text: str


def body(items: Sequence[Item]) -> dict[str, Any]:
    """The JSON document of a request."""
    return {"input": [{"content": list(map(_part, item))} for item in items], "encoding_format": "base64"}


async def ask(client: httpx.AsyncClient, items: Sequence[Item]) -> Answer:
    answer = await client.post("/v1/embeddings", json=body(items))
    vectors: tuple[Vector, ...] = ()
    if answer.status_code == 200:
        data = answer.json()["data"]
        vectors = tuple(np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data)
    return Answer(answer.status_code, vectors, answer.headers, "" if vectors else answer.text)


def connect(server: Server) -> httpx.AsyncClient:
    """A client without a limit of connections: each request in flight has its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits)


def ask_all(server: Server, requests: Sequence[Sequence[Item]]) -> list[Answer]:
    """Sends all requests at once, each on its own connection; the answers in the requests' order."""

    async def run() -> list[Answer]:
        async with connect(server) as client:
            return await asyncio.gather(*(ask(client, items) for items in requests))

    return run_async(run())


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on a loop of its own."""
    with asyncio.Runner() as runner:
        return runner.run(work)


class Truth:
    """Vectors by transformers' plain forward, each item computed once."""

    def __init__(self, folder: Path) -> None:
        self._oracle = Oracle(folder)
        self._known: dict[Item, Vector] = {}

    def of(self, item: Item) -> Vector:
        if item not in self._known:
            self._known[item] = self._oracle.embed({"parts": item, "instruction": None})
        return self._known[item]

    def check(self, items: Sequence[Item], answer: Answer) -> None:
        """The answer is a 200 with the true vector of every item, in order."""
        assert answer.status == 200, (answer.status, answer.text)
        assert len(answer.vectors) == len(items)
        for item, vector in zip(items, answer.vectors, strict=True):
            assert_same(vector, self.of(item))


class Traffic:
    """Sends the same requests round and round while the test does something to the server.

    concurrency: requests in flight at any time. Ends, with the answers of all that was sent, on exit.
    """

    def __init__(self, server: Server, requests: Sequence[Sequence[Item]], concurrency: int) -> None:
        self._server = server
        self._requests = requests
        self._concurrency = concurrency
        self._stopping = Event()
        self._thread = Thread(target=lambda: run_async(self._run()))
        self._failure: BaseException | None = None
        self.answers: list[tuple[Sequence[Item], Answer]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def await_answers(self, count: int) -> None:
        """Returns once `count` more requests, sent from now on, have been answered."""
        wanted = len(self.answers) + self._concurrency + count
        wait_until(
            lambda: len(self.answers) >= wanted or self._failure is not None,
            TIMEOUT_S,
            f"{wanted} answers (there are {len(self.answers)})",
        )

    def check(self, truth: Truth) -> None:
        """Every request was answered with true vectors."""
        assert self.answers
        for items, answer in self.answers:
            truth.check(items, answer)

    async def _run(self) -> None:
        turns = self._turns()
        try:
            async with connect(self._server) as client, asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._send(client, turns))
        except BaseException as error:  # noqa: BLE001  handed to the thread of the test
            self._failure = error

    async def _send(self, client: httpx.AsyncClient, turns: Iterator[Sequence[Item]]) -> None:
        while not self._stopping.is_set():
            items = next(turns)
            self.answers.append((items, await ask(client, items)))

    def _turns(self) -> Iterator[Sequence[Item]]:
        while True:
            yield from self._requests


def stages(server: Server) -> dict[str, list[dict[str, Any]]] | None:
    """Every stage's replicas, or None while they do not all answer: for those who ask until they do."""
    try:
        info = server.get("/info")
    except httpx.TimeoutException:
        return None
    return info.json()["stages"] if info.status_code == 200 else None


def settle(server: Server) -> None:
    """Waits until nothing is queued, pinned or being filled; then every page must be free or an entry's.

    For pictures of one page each.
    """

    def calm() -> list[dict[str, Any]] | None:
        if (found := stages(server)) is None:
            return None
        replicas = found["encoder"] + found["embedder"]
        is_busy = any(
            replica["queued_tokens"] or any(replica["cache"][level] for level in _LEVELS)
            for replica in replicas
        )
        return None if is_busy else replicas

    for replica in wait_until(calm, 60, "calm: no pin and nothing queued or being filled"):
        cache = replica["cache"]
        assert cache["pages_free"] + cache["entries"] == cache["pages"], replica


_LEVELS = ("pins", "filling", "waiting", "puts_running", "pages_draining")


def _part(part: str | bytes) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = f"data:image/png;base64,{base64.b64encode(part).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
