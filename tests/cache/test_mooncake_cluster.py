"""The cache over a real `mooncake_master`: rows that outlive processes, and servers that die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch

from epd.cache.controller import EmbeddingCache
from epd.cache.errors import StoreUnavailable
from epd.cache.pool import PagePool
from epd.cache.stores.factory import make_store
from epd.cache.stores.mooncake import MooncakeStore
from epd.cache.stores.mooncake_server import MooncakeServer
from epd.cache.types import RowLayout, Wanted
from tests.cache.tools import FakeEncoder, make_cache, rows_of, soak, wanted

pytestmark = pytest.mark.cluster

SEGMENT_BYTES = 64 << 20
BOUND_S = 30.0  # within which everything here has to recover


@pytest.fixture(scope="module")
def server() -> Iterator[MooncakeServer]:
    """A server that tests of this module kill and that comes back."""
    server = MooncakeServer(segment_bytes=SEGMENT_BYTES, client_ttl_s=2)
    server.start()
    yield server
    server.stop()


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool]) -> float:
    """Seconds until other processes have brought it about."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < BOUND_S, "not within the bound"
        time.sleep(0.02)
    return time.monotonic() - started


def is_well(server: MooncakeServer) -> bool:
    try:
        server.check()
    except StoreUnavailable:
        return False
    return True


def connect(server: MooncakeServer) -> EmbeddingCache:
    """A replica's cache: a client of its own, behind a breaker that probes soon."""
    return make_cache(make_store(mooncake_master=server.address, timeout_s=2.0, probe_s=0.1))


async def is_stored(server: MooncakeServer, item: Wanted) -> bool:
    """Whether a replica that never saw it gets the item from the store; its rows must then be right."""
    reader = connect(server)
    acquired = await reader.acquire([item], claim=False, ask_store=True)
    for handle in acquired.handles.values():
        assert torch.equal(torch.from_numpy(reader.rows(handle)), rows_of(item))
    reader.release(acquired.handles.values())
    reader.check_integrity()
    await reader.close()
    return bool(acquired.handles)


async def publish_until_stored(cache: EmbeddingCache, first: int) -> Wanted:
    """Requests of new images, none of which may fail, until one is published."""
    started = time.monotonic()
    for number in range(first, first + 100_000):
        item = wanted(number)
        acquired = await cache.acquire([item], claim=True, ask_store=True)
        handle = await cache.fill(acquired.tickets[item.key], rows_of(item))
        published = await cache.publish([handle])
        cache.release([handle])
        if published[item.key]:
            return item
        assert time.monotonic() - started < BOUND_S, "the store did not come back"
        await asyncio.sleep(0.05)
    raise AssertionError("the store did not come back")


READER = """
import asyncio, sys, torch
from epd.cache.controller import EmbeddingCache
from epd.cache.pool import PagePool
from epd.cache.stores.mooncake import MooncakeStore
from epd.cache.types import MediaGrid, MediaKey, RowLayout, Wanted

async def main(master, key, num_tokens, dtype):
    cache = EmbeddingCache(PagePool(RowLayout(8, getattr(torch, dtype)), 2, 12), MooncakeStore(master))
    wanted = Wanted(MediaKey.parse(key), MediaGrid(1, 2, 2 * num_tokens), num_tokens)
    handle = (await cache.acquire([wanted], claim=False, ask_store=True)).handles[wanted.key]
    print("rows", cache.rows(handle).tobytes().hex())
    cache.release([handle])
    cache.check_integrity()
    await cache.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
async def test_rows_outlive_their_writer_and_are_bit_equal_elsewhere(
    server: MooncakeServer, dtype: torch.dtype
) -> None:
    """A process that never saw the picture reads what a closed replica wrote, bit for bit."""
    layout = RowLayout(8, dtype)
    item = wanted(1000 + dtype.itemsize)
    rows = rows_of(item, layout)
    store = make_store(mooncake_master=server.address)
    writer = EmbeddingCache(PagePool(layout, 2, 12), store)
    await asyncio.to_thread(wait_until, lambda: is_well(server))
    ticket = (await writer.acquire([item], claim=True, ask_store=False)).tickets[item.key]
    handle = await writer.fill(ticket, rows)
    assert await writer.publish([handle]) == {item.key: True}
    expected = writer.rows(handle).tobytes().hex()
    writer.release([handle])
    await writer.close()
    arguments = [server.address, str(item.key), str(item.num_tokens), str(dtype).removeprefix("torch.")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READER, *arguments),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    output, _ = await process.communicate()
    assert f"rows {expected}" in output.decode().splitlines()


async def test_a_master_that_dies_costs_hits_and_no_request(server: MooncakeServer) -> None:
    """Killed before, during and after requests, it comes back empty; the same clients hit again."""
    cache = connect(server)
    before = await publish_until_stored(cache, 10_000)
    assert await is_stored(server, before)
    address = server.address
    kill(server.master.pid)
    during = await publish_until_stored(cache, 20_000)
    assert server.address == address
    assert await is_stored(server, during)
    assert not await is_stored(server, before)
    stop = asyncio.Event()

    async def keep_asking(first: int) -> int:
        number = first
        encoder = FakeEncoder()
        while not stop.is_set():
            cache.release((await encoder.hold(cache, wanted(number), wanted(number + 1))).values())
            number += 1
        return number - first

    asking = [asyncio.create_task(keep_asking(first)) for first in (30_000, 40_000)]
    await asyncio.sleep(0.05)
    kill(server.master.pid)
    await asyncio.to_thread(wait_until, lambda: is_well(server))
    stop.set()
    assert min(await asyncio.gather(*asking)) > 0
    after = await publish_until_stored(cache, 50_000)
    assert await is_stored(server, after)
    cache.check_integrity()
    assert cache.stats()["pages_draining"] == 0
    await cache.close()


async def test_a_segment_owner_that_dies_mid_transfer_costs_hits_and_no_request(
    server: MooncakeServer,
) -> None:
    """Killed under running gets and puts of large rows: what is got is right, and the store recovers."""
    layout = RowLayout(1024, torch.float32)

    def large(number: int) -> Wanted:
        return wanted(number, 512)  # 2 MiB

    def replica() -> EmbeddingCache:
        store = make_store(mooncake_master=server.address, timeout_s=2.0, probe_s=0.1)
        return EmbeddingCache(PagePool(layout, 16, 4 * 32, pin=False), store)

    base = torch.randn(512, 1024)
    writer, reader = replica(), replica()
    stop, was_read = asyncio.Event(), asyncio.Event()
    stored: list[Wanted] = []

    def rows(item: Wanted) -> torch.Tensor:
        return base + int(item.key.digest[:4], 16)

    async def write() -> None:
        number = 60_000
        while not stop.is_set():
            item = large(number)
            acquired = await writer.acquire([item], claim=True, ask_store=True)
            handle = await writer.fill(acquired.tickets[item.key], rows(item))
            if (await writer.publish([handle]))[item.key]:
                stored.append(item)
            writer.release([handle])
            number += 1

    async def read() -> None:
        number = 0
        while not stop.is_set():
            await asyncio.sleep(0)
            wished = stored[number % len(stored) :][:1] if stored else []
            hits = reader.stats()["hits_store"]
            acquired = await reader.acquire(wished, claim=False, ask_store=True)
            for handle in acquired.handles.values():
                assert torch.equal(torch.from_numpy(reader.rows(handle)), rows(handle.wanted))
            if reader.stats()["hits_store"] > hits:
                was_read.set()
            reader.release(acquired.handles.values())
            number += 1

    tasks = [asyncio.create_task(job) for job in (write(), read())]
    for _ in range(2):
        async with asyncio.timeout(BOUND_S):
            await was_read.wait()
        killed = server.owner.pid
        kill(killed)
        await asyncio.to_thread(wait_until, lambda: server.owner.pid not in (killed, None))  # noqa: B023
        was_read.clear()
    async with asyncio.timeout(BOUND_S):
        await was_read.wait()
    stop.set()
    await asyncio.gather(*tasks)
    cache = connect(server)
    assert await is_stored(server, await publish_until_stored(cache, 70_000))
    for replica_cache in (writer, reader, cache):
        replica_cache.check_integrity()
        await replica_cache.close()
        assert replica_cache.stats()["pages_draining"] == 0


HALF_A_PUT = """
import os, sys, time
os.environ["MC_LOG_LEVEL"] = "ERROR"
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
assert client.batch_put_session_start([sys.argv[2]], [int(sys.argv[3])]) == [0]
print("begun", flush=True)
time.sleep(600)
"""


async def test_a_writer_that_dies_mid_put_blocks_its_key_for_a_while_only(server: MooncakeServer) -> None:
    """Meanwhile readers miss and writers are told that it is not stored; other keys are not affected."""
    item = wanted(80_000)
    size = item.num_tokens * 32 + 512
    cache = connect(server)
    await publish_until_stored(cache, 81_000)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HALF_A_PUT, server.address, str(item.key), str(size)), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    process.kill()
    await process.wait()
    acquired = await cache.acquire([item], claim=True, ask_store=True)
    handle = await cache.fill(acquired.tickets[item.key], rows_of(item))
    assert await cache.publish([handle]) == {item.key: False}
    assert not await is_stored(server, item)
    assert await is_stored(server, await publish_until_stored(cache, 82_000))
    started = time.monotonic()
    while not (await cache.publish([handle]))[item.key]:
        assert time.monotonic() - started < BOUND_S
        await asyncio.sleep(0.2)
    assert await is_stored(server, item)
    cache.release([handle])
    await cache.close()


@pytest.mark.long
async def test_very_many_entries_leave_memory_flat(server: MooncakeServer) -> None:
    """20,000 distinct small entries through a small pool and the store."""
    store = make_store(mooncake_master=server.address)
    assert store is not None
    await soak(store, 20_000, most_growth=4 << 20)


SERVER = """
import time
from epd.cache.stores.mooncake_server import MooncakeServer
server = MooncakeServer(segment_bytes=16 << 20)
server.start()
print(server.master.pid, server.owner.pid, flush=True)
time.sleep(600)
"""


def test_both_processes_die_with_their_parent() -> None:
    """A server whose process is killed leaves nothing behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Whether the process runs: one that waits for its parent to collect it does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_server_stops_and_says_what_is_down() -> None:
    """It outlives the thread that started it; check raises once it is gone; stop may be called twice."""
    server = MooncakeServer(segment_bytes=16 << 20)
    starter = Thread(target=server.start)
    starter.start()
    starter.join()
    server.check()
    pids = [server.master.pid, server.owner.pid]
    server.stop()
    server.stop()
    assert not any(is_alive(pid) for pid in pids if pid)
    with pytest.raises(StoreUnavailable, match="master is down"):
        server.check()


def test_a_port_in_use_is_an_error_at_the_start(server: MooncakeServer) -> None:
    """The message says which, and nothing is left running."""
    second = MooncakeServer(rpc_port=server.rpc_port, segment_bytes=16 << 20)
    with pytest.raises(StoreUnavailable, match=f"port {server.rpc_port} of 127.0.0.1 is in use"):
        second.start()
    assert second.master.pid is None


def test_without_a_master_the_store_is_unavailable() -> None:
    """Start-up fails with the address instead of hanging."""
    with pytest.raises(StoreUnavailable, match=r"cannot reach the Mooncake master at 127\.0\.0\.1:9"):
        MooncakeStore("127.0.0.1:9")
