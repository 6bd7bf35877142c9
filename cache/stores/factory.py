"""Puts stores together. What a deployment does not use is not imported."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from epd.cache.breaker import CircuitBreaker
from epd.cache.stores.base import Store


def make_store(
    *,
    mooncake_master: str | None = None,
    host: str = "127.0.0.1",
    protocol: str = "tcp",
    device: str = "",
    shared_memory_name: str | None = None,
    shared_memory_bytes: int = 0,
    shared_memory_parent: Path = Path("/dev/shm"),
    timeout_s: float = 2.0,
    max_failures: int = 3,
    probe_s: float = 5.0,
) -> Store | None:
    """Shared memory of the host, when named, in front of Mooncake, when there is a master; None without both.

    mooncake_master: host:port. host: address of this host for others. protocol: tcp or rdma. device: RDMA
    devices. shared_memory_parent: an existing folder of a memory file system; others may use it too.
    timeout_s, max_failures, probe_s: see CircuitBreaker; Mooncake is behind one, so that shared memory
    serves on while it is down. Raises StoreUnavailable, and ValueError for memory that is not there.
    """
    far: Store | None = None
    with ExitStack() as undo:
        near: Store | None = None
        if shared_memory_name is not None:
            from epd.cache.stores.shared_memory import SharedMemoryStore

            near = SharedMemoryStore(shared_memory_name, shared_memory_bytes, parent=shared_memory_parent)
            undo.callback(near.close)
        if mooncake_master is not None:
            from epd.cache.stores.guarded import GuardedStore
            from epd.cache.stores.mooncake import MooncakeStore

            breaker = CircuitBreaker(max_failures=max_failures, timeout_s=timeout_s, probe_s=probe_s)
            mooncake = MooncakeStore(
                mooncake_master, host=host, protocol=protocol, device=device, timeout_s=timeout_s
            )
            far = GuardedStore(mooncake, breaker)
        undo.pop_all()
    if near is None or far is None:
        return near or far
    from epd.cache.stores.tiered import TieredStore

    return TieredStore(near, far)
