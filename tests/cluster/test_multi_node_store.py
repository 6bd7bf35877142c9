"""Where rows lie and travel, on a real Mooncake: what a replica's settings make of its host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from epd.cache.stores.base import GetResult, PutResult, Store
from epd.cache.stores.mooncake_library import import_store
from epd.cache.stores.mooncake_server import MooncakeServer
from epd.deployments.settings import StoreSettings
from epd.deployments.stage import open_store

pytestmark = pytest.mark.cluster

SIZE = 100_000


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


def test_more_shared_memory_than_there_is_is_refused(server: MooncakeServer) -> None:
    """A replica does not start with a tier that the host cannot hold, and says how much there is."""
    status = os.statvfs("/dev/shm")
    with pytest.raises(ValueError, match="bytes left"):
        open_with(server, torch.zeros(1), 2 * status.f_blocks * status.f_frsize)


def test_a_segment_can_be_asked_for_by_its_name(server: MooncakeServer) -> None:
    """What docs/kubernetes.md says of `preferred_segment`: with the exact name all objects go there."""
    library = import_store()
    owner, writer = library.MooncakeDistributedStore(), library.MooncakeDistributedStore()
    name = "127.0.0.2:17171"
    assert owner.setup(name, "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", server.address) == 0
    assert writer.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", server.address) == 0
    try:
        config = library.ReplicateConfig()
        config.preferred_segment = name
        data = ctypes.create_string_buffer(SIZE)
        places = set()
        for i in range(8):
            assert writer.put(f"k{i}", data.raw, config) == 0
            (replica,) = writer.get_replica_desc(f"k{i}")
            places.add(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint.split(":")[0])
        assert places == {"127.0.0.2"}
    finally:
        writer.close()
        owner.close()
