"""Three ways for processes of one host to share rows: files, Mooncake over TCP, its standalone client.

    python -m benchmarks.host_sharing

One object of 0.25 to 16 MiB is put and read back, in one page run and in runs of 128 KiB, in turn by:
`files` in /dev/shm (`SharedMemoryStore`); `TCP`, a `MooncakeStore` as replicas use it, whose segment another
process owns; `IPC`, a client without a segment (`setup_dummy`) that shares memory with a `mooncake_client` of
its host, which owns the segment and does the copies. All are called without event loop, threads or checksums:
what differs is how bytes move. Every read is compared with what was put. Medians, beside a memcpy.
Keeps what it printed in benchmarks/results/host_sharing.txt.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.report import RESULTS, load_average, machine, table
from epd.cache.stores.base import Buffers, GetResult, PutResult
from epd.cache.stores.mooncake import MooncakeStore
from epd.cache.stores.mooncake_library import import_store, master_path
from epd.cache.stores.mooncake_server import MooncakeServer, free_port
from epd.cache.stores.shared_memory import SharedMemoryStore

SIZES_MIB = (0.25, 1, 4, 16)
RUN_BYTES = 128 << 10
MAX_BYTES = 16 << 20
REPEATS = 25
START_S = 30.0
IPC_POOL_BYTES = 256 << 20


class Way(Protocol):
    """A way to share, with memory of `2 * MAX_BYTES` that it can read and write: to put from, to get into."""

    memory: npt.NDArray[np.uint8]

    def put(self, key: str, buffers: Buffers) -> bool: ...

    def get(self, key: str, buffers: Buffers) -> bool: ...


class StoreWay:
    """One of our stores."""

    def __init__(self, store: SharedMemoryStore | MooncakeStore) -> None:
        self._store = store
        memory = torch.zeros(2 * MAX_BYTES, dtype=torch.uint8)
        store.register(memory)
        self.memory = memory.numpy()

    def put(self, key: str, buffers: Buffers) -> bool:
        return self._store.put_from([key], [buffers]) == [PutResult.STORED]

    def get(self, key: str, buffers: Buffers) -> bool:
        return self._store.get_into([key], [buffers]) in ([GetResult.HOST], [GetResult.STORE])


class IpcWay:
    """The library's client without a segment. Its memory is the library's: others' it does not take."""

    def __init__(self, server: str) -> None:
        self._client = import_store().MooncakeDistributedStore()
        if code := self._client.setup_dummy(IPC_POOL_BYTES, IPC_POOL_BYTES // 4, server):
            raise RuntimeError(f"setup_dummy({server}) failed with {code}")
        pointer = self._client.alloc_from_mem_pool(2 * MAX_BYTES)
        if code := self._client.register_buffer(pointer, 2 * MAX_BYTES):
            raise RuntimeError(f"register_buffer failed with {code}")
        self.memory = np.ctypeslib.as_array((ctypes.c_uint8 * (2 * MAX_BYTES)).from_address(pointer))

    def put(self, key: str, buffers: Buffers) -> bool:
        pointers, sizes = zip(*buffers, strict=True)
        codes: Any = self._client.batch_put_from_multi_buffers([key], [list(pointers)], [list(sizes)])
        return bool(codes == [0])

    def get(self, key: str, buffers: Buffers) -> bool:
        pointers, sizes = zip(*buffers, strict=True)
        codes: Any = self._client.batch_get_into_multi_buffers([key], [list(pointers)], [list(sizes)])
        return bool(codes == [sum(sizes)])

    def close(self) -> None:
        self._client.close()


@contextmanager
def standalone_client(master: str) -> Iterator[str]:
    """Address of a `mooncake_client` with a segment of its own."""
    port = free_port("127.0.0.1")
    command = [
        str(master_path().with_name("mooncake_client")),
        *("--host=127.0.0.1", f"--port={port}", f"--master_server_address={master}"),
        *("--metadata_server=P2PHANDSHAKE", "--global_segment_size=1GB"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while f"@mooncake_client_{port}.sock" not in Path("/proc/net/unix").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("mooncake_client did not start")
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def measure(ways: dict[str, Way], size: int, run_bytes: int) -> dict[str, float]:
    """Seconds of `put NAME`, `get NAME` and `memcpy`, medians."""
    rng = np.random.default_rng(size)
    seconds: dict[str, list[float]] = {}

    def take(name: str, started: float) -> None:
        seconds.setdefault(name, []).append(time.perf_counter() - started)

    for repeat in range(REPEATS):
        data = rng.integers(0, 256, size, dtype=np.uint8)
        copy = np.zeros_like(data)
        started = time.perf_counter()
        copy[:] = data
        take("memcpy", started)
        for name, way in ways.items():
            way.memory[:size] = data
            way.memory[MAX_BYTES : MAX_BYTES + size] = 0
            key = f"{size} {run_bytes} {repeat}"
            source, target = (
                runs(way.memory, 0, size, run_bytes),
                runs(way.memory, MAX_BYTES, size, run_bytes),
            )
            started = time.perf_counter()
            stored = way.put(key, source)
            take(f"put {name}", started)
            started = time.perf_counter()
            found = way.get(key, target)
            take(f"get {name}", started)
            assert stored, f"{name} did not take {key}"
            assert found, f"{name} lost {key}"
            assert np.array_equal(way.memory[MAX_BYTES : MAX_BYTES + size], data), f"{name} changed {key}"
    return {name: median(taken) for name, taken in seconds.items()}


def runs(memory: npt.NDArray[np.uint8], start: int, size: int, run_bytes: int) -> list[tuple[int, int]]:
    """The memory's bytes from `start` on in pieces, their order turned round so that no two are one."""
    pieces = [
        (memory.ctypes.data + start + at, min(run_bytes, size - at)) for at in range(0, size, run_bytes)
    ]
    return pieces[::-1]


def report(ways: dict[str, Way]) -> str:
    names = ["memcpy", *(f"{what} {name}" for what in ("put", "get") for name in ways)]
    milliseconds: list[Sequence[str]] = []
    ratios: list[Sequence[str]] = []
    for size_mib in SIZES_MIB:
        size = int(size_mib * (1 << 20))
        for run_bytes in (size, RUN_BYTES):
            times = measure(ways, size, run_bytes)
            title = f"{size_mib} MiB, {size // run_bytes} runs"
            milliseconds.append([title, *(f"{times[name] * 1e3:.2f}" for name in names)])
            ratios.append([title, *(f"{times[name] / times[f'{name[:3]} files']:.2f}" for name in names[1:])])
    return "\n".join(
        (
            *("milliseconds, medians", table(("object", *names), milliseconds), ""),
            *("ratio to the time of files", table(("object", *names[1:]), ratios), ""),
        )
    )


def main() -> None:
    about = machine(f"{os.cpu_count()} CPUs", f"{REPEATS} repeats in turn")
    server, second = MooncakeServer(segment_bytes=1 << 30), MooncakeServer()
    server.start()
    second.master.start()  # without its segment: that of the standalone client is to be the only one
    try:
        with standalone_client(second.address) as address:
            files = SharedMemoryStore(f"bench-{os.getpid()}", 1 << 30)
            far, near = MooncakeStore(server.address), IpcWay(address)
            text = report({"files": StoreWay(files), "TCP": StoreWay(far), "IPC": near})
            near.close()
            far.close()
            files.close()
    finally:
        server.stop()
        second.stop()
    text = f"{about}, {load_average()} at the end\n\n{text}"
    print(text, end="")
    (RESULTS / "host_sharing.txt").write_text(text)


if __name__ == "__main__":
    main()
