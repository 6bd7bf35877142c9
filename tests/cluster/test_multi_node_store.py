"""Where rows lie and travel, on a real Mooncake: what a replica's settings make of its host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from epd.cache.stores.base import GetResult, PutResult, Store
from epd.cache.stores.mooncake_library import import_store, master_path
from epd.cache.stores.mooncake_server import MooncakeServer, free_port
from epd.deployments.settings import StoreSettings
from epd.deployments.stage import open_store
from tests.cluster.hosts import namespaces_work, network
from tests.cluster.server import ROOT, wait_until

pytestmark = pytest.mark.cluster

SIZE = 100_000
SEGMENT_HOSTS = ("127.0.0.2", "127.0.0.3")


@pytest.fixture
def server() -> Iterator[MooncakeServer]:
    server = MooncakeServer(segment_bytes=64 << 20)
    server.start()
    yield server
    server.stop()


def open_with(server: MooncakeServer, memory: torch.Tensor, host_bytes: int) -> Store:
    store = open_store(StoreSettings(managed=False, address=server.address, host_bytes=host_bytes))
    store.register(memory)
    return store


def test_replicas_of_one_host_share_memory_in_front_of_the_store(server: MooncakeServer) -> None:
    """With `host_bytes` a row that one replica stored reaches another by memory; without, from Mooncake."""
    written = torch.arange(SIZE, dtype=torch.int64).to(torch.uint8)
    read = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    with (
        closing(open_with(server, written, 16 << 20)) as writer,
        closing(open_with(server, read[0], 16 << 20)) as neighbour,
        closing(open_with(server, read[1], 0)) as stranger,
    ):
        assert writer.put_from(["n/k"], [[(written.data_ptr(), SIZE)]]) == [PutResult.STORED]
        found = [
            store.get_into(["n/k"], [[(memory.data_ptr(), SIZE)]])
            for store, memory in ((neighbour, read[0]), (stranger, read[1]))
        ]
    assert found == [[GetResult.HOST], [GetResult.STORE]]
    assert all(torch.equal(memory, written) for memory in read)


@pytest.mark.skipif(not namespaces_work(), reason="needs root and network namespaces")
def test_pods_of_one_host_share_rows_without_a_network(tmp_path: Path) -> None:
    """Two pods with networks, process tables, /tmp and /dev/shm of their own, no cable between them, and one
    folder of the host's memory: what one has put the other reads, and once both are gone nothing is left.
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    program = (sys.executable, ROOT / "tests/cluster/host_rows.py")
    with network(["writer", "reader"], tmp_path) as hosts, host_memory() as folder, ExitStack() as undo:
        hosts["writer"].cut()
        writer = hosts["writer"].start("pod", *program, "put", folder, env=env)
        undo.callback(writer.kill)
        wait_until(lambda: "ready" in writer.log.read_text(), 120, "the put")
        for path, found in ((folder, "HOST True"), ("/dev/shm", "ABSENT False")):
            reader = hosts["reader"].start("pod", *program, "get", path, env=env)
            undo.callback(reader.kill)
            assert reader.wait(120) == 0, reader.log.read_text()
            assert reader.log.read_text().splitlines()[-1] == found
        assert list(folder.iterdir())
        writer.kill()
        last = hosts["reader"].start("pod", *program, "get", folder, env=env)
        undo.callback(last.kill)
        assert last.wait(120) == 0, last.log.read_text()
        assert not list(folder.iterdir())


@contextmanager
def host_memory() -> Iterator[Path]:
    """A folder in memory that pods see: not in /tmp, not in /dev/shm, of which they have their own."""
    folder = Path(tempfile.mkdtemp(prefix="epd-", dir="/var/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()


def test_a_folder_that_is_not_there_is_refused() -> None:
    """A replica whose `host_path` is not mounted says so at once, and makes no folder on a disk."""
    settings = StoreSettings(backend="shared_memory", host_bytes=1 << 20, host_path="/not/mounted")
    with pytest.raises(ValueError, match="'/not/mounted'"):
        open_store(settings)


def test_more_shared_memory_than_there_is_is_refused(server: MooncakeServer) -> None:
    """A replica does not start with a tier that the host cannot hold, and says how much there is."""
    status = os.statvfs("/dev/shm")
    with pytest.raises(ValueError, match="bytes left"):
        open_with(server, torch.zeros(1), 2 * status.f_blocks * status.f_frsize)


@pytest.fixture
def segments() -> Iterator[str]:
    """A master's address; segments lie at 127.0.0.2 and 127.0.0.3."""
    yield from serve_segments()


@pytest.fixture
def local_first() -> Iterator[str]:
    """As `segments`, with a master that places objects near their writers."""
    yield from serve_segments("--allocation_strategy=local_first")


def serve_segments(*options: str) -> Iterator[str]:
    port, metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
    address = f"127.0.0.1:{port}"
    command = [
        *(str(master_path()), "--rpc_address=127.0.0.1", f"--rpc_port={port}"),
        *("--metrics_host=127.0.0.1", f"--metrics_port={metrics}", "--minloglevel=2", *options),
    ]
    with ExitStack() as undo:
        master = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        undo.callback(master.wait)
        undo.callback(master.kill)
        wait_until(lambda: is_open(port), 30, "Mooncake's master")
        for host in SEGMENT_HOSTS:
            undo.callback(connect(f"{host}:17171", address, 64 << 20).close)
        yield address


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def connect(host: str, master: str, segment_bytes: int = 0) -> Any:
    client = import_store().MooncakeDistributedStore()
    assert client.setup(host, "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master) == 0
    return client


def places(master: str, writer: str, **wishes: Any) -> set[str]:
    """Hosts of the segments where 16 objects lie that a writer at address `writer` has put, one by one."""
    data = torch.zeros(SIZE, dtype=torch.uint8)
    with closing(connect(writer, master)) as client:
        assert client.register_buffer(data.data_ptr(), SIZE) == 0
        config = import_store().ReplicateConfig()
        for name, value in wishes.items():
            setattr(config, name, value)
        found = set()
        for i in range(16):
            key = f"{writer}-{wishes}-{i}"
            assert client.batch_put_from_multi_buffers([key], [[data.data_ptr()]], [[SIZE]], config) == [0]
            (replica,) = client.get_replica_desc(key)
            found.add(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint.split(":")[0])
    return found


def test_mooncake_places_objects_as_it_is_asked(segments: str) -> None:
    """What docs/kubernetes.md says of ReplicateConfig: a segment by its exact name, the first of a list that
    there is, or one at the writer's address. Else any segment, for a loopback address as well.
    """
    everywhere = set(SEGMENT_HOSTS)
    assert places(segments, "127.0.0.3") == everywhere
    assert places(segments, "127.0.0.3", preferred_segment="127.0.0.2:17171") == {"127.0.0.2"}
    assert places(segments, "127.0.0.3", preferred_segment="127.0.0.2:1") == everywhere
    names = ["127.0.0.9:17171", "127.0.0.2:17171"]
    assert places(segments, "127.0.0.3", preferred_segments=names) == {"127.0.0.2"}
    assert places(segments, "127.0.0.3", prefer_alloc_in_same_node=True) == {"127.0.0.3"}
    assert places(segments, "127.0.0.1", prefer_alloc_in_same_node=True) == everywhere


def test_a_master_can_place_objects_near_their_writers(local_first: str) -> None:
    """What docs/kubernetes.md says of local_first: the writer's own address, else the first one there is."""
    assert places(local_first, "127.0.0.3") == {"127.0.0.3"}
    assert places(local_first, "127.0.0.2") == {"127.0.0.2"}
    assert places(local_first, "127.0.0.9") == {"127.0.0.2"}
