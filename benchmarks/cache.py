"""How fast rows move through the embedding cache: pool, shared memory of the host, Mooncake over TCP.

    python -m benchmarks.cache

Each operation of `EmbeddingCache` is timed from its call to its end, event loop and threads included, for
entries of 0.25 to 16 MiB, on one page run and on one run per page. The baselines, in the same run and
in turn with it: a plain memcpy of the bytes, and a file of them in /dev/shm that is written, or read
and copied into the pool. A get or put hands its work to a thread and verifies or makes a checksum, the
baselines do neither; that is what small entries pay. Medians.
Keeps what it printed in benchmarks/results/cache.txt.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.report import RESULTS, machine, table
from epd.cache.controller import EmbeddingCache
from epd.cache.handles import Handle
from epd.cache.keys import media_key
from epd.cache.pool import PagePool
from epd.cache.stores.base import Store
from epd.cache.stores.mooncake import MooncakeStore
from epd.cache.stores.mooncake_server import MooncakeServer
from epd.cache.stores.shared_memory import SharedMemoryStore
from epd.cache.types import MediaGrid, RowLayout, Wanted

LAYOUT = RowLayout(row_dim=4096, dtype=torch.bfloat16)
PAGE_TOKENS = 16
PAGE_BYTES = PAGE_TOKENS * LAYOUT.row_bytes
SIZES_MIB = (0.25, 1, 4, 16)
REPEATS = 15
HIT_KEYS = 64
GOAL_HIT_US = 50.0
GOAL_HOST_RATIO = 1.0


@dataclass
class Times:
    """Seconds of each operation, repeat by repeat."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    async def take(self, name: str, work: Callable[[], Awaitable[object]]) -> None:
        started = time.perf_counter()
        await work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def median(self, name: str) -> float:
        return median(self.seconds[name])


def wanted(name: str, num_tokens: int) -> Wanted:
    return Wanted(media_key("bench", name.encode()), MediaGrid(1, 2, 2 * num_tokens), num_tokens)


async def make_cache(store: Store | None, num_pages: int, *, fragmented: bool) -> EmbeddingCache:
    """Room for one entry of `num_pages`; fragmented: in single pages, with pages in use between them."""
    pool = PagePool(LAYOUT, PAGE_TOKENS, 2 * num_pages if fragmented else num_pages)
    cache = EmbeddingCache(pool, store, timeout_s=30.0)
    if fragmented:
        handles = []
        for page in range(2 * num_pages):
            handles.append(await fill(cache, wanted(f"page {page}", PAGE_TOKENS), page_rows))
        cache.release(handles[::2])
    return cache


page_rows = torch.zeros(PAGE_TOKENS, LAYOUT.row_dim, dtype=LAYOUT.dtype)


async def fill(cache: EmbeddingCache, item: Wanted, rows: torch.Tensor) -> Handle:
    acquired = await cache.acquire([item], claim=True, ask_store=False)
    return await cache.fill(acquired.tickets[item.key], rows)


async def measure(size: int, fragmented: bool, master: str, folder: Path) -> Times:
    """All operations on entries of `size` bytes."""
    num_tokens = size // LAYOUT.row_bytes
    num_pages = num_tokens // PAGE_TOKENS
    rows = torch.randn(num_tokens, LAYOUT.row_dim).to(LAYOUT.dtype)
    target = torch.zeros_like(rows)
    stores: dict[str, Callable[[], Store]] = {
        "host": lambda: SharedMemoryStore(f"bench-{os.getpid()}", 1 << 30, parent=folder),
        "store": lambda: MooncakeStore(master),
    }
    times = Times()
    for name, make_store in stores.items():
        writer = await make_cache(make_store(), num_pages, fragmented=fragmented)
        reader = await make_cache(make_store(), num_pages, fragmented=fragmented)
        for repeat in range(REPEATS):
            item = wanted(f"{name} {size} {fragmented} {repeat}", num_tokens)
            ticket = (await writer.acquire([item], claim=True, ask_store=False)).tickets[item.key]
            handles: list[Handle] = []

            async def fill_ticket() -> None:
                handles.append(await writer.fill(ticket, rows))  # noqa: B023  awaited before the next repeat

            async def get() -> None:
                acquired = await reader.acquire([item], claim=False, ask_store=True)  # noqa: B023
                handles.extend(acquired.handles.values())  # noqa: B023

            async def load() -> None:
                reader.load(handles[1:], target, [0]).wait()  # noqa: B023

            async def publish() -> None:
                stored = await writer.publish(handles[:1])  # noqa: B023
                assert all(stored.values())

            async def hit() -> None:
                reader.release((await reader.acquire([item], claim=False, ask_store=True)).handles.values())  # noqa: B023

            await times.take("fill", fill_ticket)
            await times.take(f"publish {name}", publish)
            await times.take(f"get {name}", get)
            assert torch.equal(reader.pool.copy_rows(handles[1].runs, num_tokens), rows)
            await times.take("load", load)
            await times.take("hit", hit)
            await baselines(times, rows, reader, handles[1], folder)
            writer.release(handles[:1])
            reader.release(handles[1:])
        await asyncio.gather(writer.close(), reader.close())
    return times


async def baselines(
    times: Times, rows: torch.Tensor, reader: EmbeddingCache, handle: Handle, folder: Path
) -> None:
    """memcpy of the rows, and a file of them: written; read, and copied to the pages that hold them."""
    path = folder / "epd-bench-file"
    source, copy = bytes_of(rows), torch.zeros_like(rows)
    pages = [
        bytes_of(reader.pool.rows[run.start * PAGE_TOKENS : (run.start + run.length) * PAGE_TOKENS])
        for run in handle.runs
    ]

    async def memcpy() -> None:
        copy.copy_(rows)

    async def write() -> None:
        path.write_bytes(source)

    async def read_and_copy() -> None:
        data, at = path.read_bytes(), 0
        for page in pages:
            page[:] = data[at : at + len(page)]
            at += len(page)

    await times.take("memcpy", memcpy)
    await times.take("file write", write)
    await times.take("file read", read_and_copy)
    path.unlink()


def bytes_of(rows: torch.Tensor) -> memoryview:
    """The memory of contiguous rows."""
    view: memoryview = rows.view(torch.uint8).numpy().data
    return view.cast("B")


async def hit_overhead() -> float:
    """Microseconds per key of an acquire and release of `HIT_KEYS` keys that are all in the pool."""
    cache = await make_cache(None, HIT_KEYS, fragmented=False)
    items = [wanted(f"hit {number}", PAGE_TOKENS) for number in range(HIT_KEYS)]
    cache.release([await fill(cache, item, page_rows) for item in items])
    taken = []
    for _ in range(200):
        started = time.thread_time()
        cache.release((await cache.acquire(items, claim=False, ask_store=True)).handles.values())
        taken.append(time.thread_time() - started)
    return median(taken) / HIT_KEYS * 1e6


OPERATIONS = (
    ("memcpy", "memcpy"),
    ("fill", "fill"),
    ("load", "load"),
    ("file write", "file write"),
    ("publish host", "publish, host"),
    ("file read", "file read, copy"),
    ("get host", "get, host"),
    ("publish store", "publish, store"),
    ("get store", "get, store"),
)


async def run(master: str, folder: Path) -> str:
    """The report."""
    milliseconds, speeds, ratios = [], [], []
    for size_mib in SIZES_MIB:
        for fragmented in (False, True):
            size = int(size_mib * (1 << 20))
            times = await measure(size, fragmented, master, folder)
            name = f"{size_mib} MiB, {size // PAGE_BYTES if fragmented else 1} runs"
            milliseconds.append([name, *(f"{times.median(key) * 1e3:.2f}" for key, _ in OPERATIONS)])
            speeds.append([name, *(f"{size / times.median(key) / 1e9:.2f}" for key, _ in OPERATIONS)])
            host = times.median("get host") / times.median("file read")
            put = times.median("publish host") / times.median("file write")
            store = times.median("get store") / times.median("file read")
            ratios.append(
                [name, f"{host:.2f}", f"{put:.2f}", f"{store:.2f}", f"{times.median('hit') * 1e6:.0f}"]
            )
    header = ("entry", *(title for _, title in OPERATIONS))
    overhead = await hit_overhead()
    missed = [row[0] for row in ratios if float(row[1]) > GOAL_HOST_RATIO]
    return "\n".join(
        (
            machine(f"torch {torch.__version__}", f"{os.cpu_count()} CPUs"),
            "",
            "milliseconds, medians",
            table(header, milliseconds),
            "",
            "gigabytes (10^9) a second",
            table(header, speeds),
            "",
            "ratios of times; hit: microseconds of one acquire and release of a key in the pool",
            table(
                (
                    "entry",
                    "get, host : file read, copy",
                    "publish, host : file write",
                    "get, store : file",
                    "hit",
                ),
                ratios,
            ),
            "",
            f"get, host at most {GOAL_HOST_RATIO} of file read and copy: "
            + (f"missed for {'; '.join(missed)}" if missed else "met"),
            f"a hit, {HIT_KEYS} keys a request: {overhead:.1f} us of CPU a key, "
            f"goal below {GOAL_HIT_US:.0f}: {'met' if overhead < GOAL_HIT_US else 'missed'}",
            "",
        )
    )


def main() -> None:
    folder = Path("/dev/shm")
    server = MooncakeServer(segment_bytes=2 << 30)
    server.start()
    try:
        report = asyncio.run(run(server.address, folder))
    finally:
        server.stop()
    print(report, end="")
    (RESULTS / "cache.txt").write_text(report)


if __name__ == "__main__":
    main()
