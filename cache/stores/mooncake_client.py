"""One Mooncake client per process: when it may be called, how much at once, and when it is built anew."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Protocol

from epd.cache.errors import StoreUnavailable

logger = logging.getLogger(__name__)

MAX_TRANSFERS = 1000
"""Page runs in flight per client. About 2048 wedge one for good: `-800`, calls that block for a minute."""


class Client(Protocol):
    """What is used of `mooncake.store.MooncakeDistributedStore`."""

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]: ...

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]: ...

    def close(self) -> int: ...


class ClientSlot:
    """Holds the client that is current. A call before set-up or after close would end the process, so
    every call is counted here, and a client is closed by the last call that used it.

    `connect` makes a client that is set up, and raises StoreUnavailable when it cannot.
    """

    def __init__(self, connect: Callable[[], Client], *, max_transfers: int = MAX_TRANSFERS) -> None:
        self.num_rebuilds = 0
        self.num_crowded = 0
        """Calls that gave up waiting for others' transfers to end."""
        self._connect = connect
        self._max_transfers = max_transfers
        self._changed = Condition()
        self._memory: tuple[int, int] | None = None
        self._client: Client | None = connect()
        self._calls: dict[int, int] = {}
        self._num_transfers = 0
        self._replacing = False

    def register(self, pointer: int, size: int) -> None:
        """Registers the one piece of memory, with this client and those that follow it."""
        with self._changed:
            if self._memory is not None:
                raise ValueError("memory was registered already: one registration per process")
            if self._client is None:
                raise ValueError("the store is closed")
            self._memory = (pointer, size)
            _register(self._client, self._memory)

    @contextmanager
    def use(self, num_transfers: int, timeout_s: float) -> Iterator[Client | None]:
        """The client, for one call of so many transfers; None when closed, or crowded for `timeout_s`."""
        client = self._enter(num_transfers, timeout_s)
        try:
            yield client
        finally:
            if client is not None:
                self._leave(client, num_transfers)

    def replace(self) -> None:
        """Puts a new client in the place of the current one. The old one stays when that fails."""
        with self._changed:
            if self._replacing or self._client is None:
                return
            self._replacing = True
        fresh: Client | None = None
        try:
            fresh = self._connect()
            if self._memory is not None:
                _register(fresh, self._memory)
        except StoreUnavailable as error:
            logger.warning("mooncake: no new client: %s", error)
        with self._changed:
            self._replacing = False
            if fresh is None:
                return
            old = fresh if self._client is None else self._client  # closed meanwhile
            if self._client is not None:
                self._client = fresh
                self.num_rebuilds += 1
            idle = not self._calls.get(id(old))
        if idle:
            old.close()

    def close(self) -> None:
        """No call reaches the library any more. A call that is running closes the client as it ends."""
        with self._changed:
            client, self._client = self._client, None
            idle = client is not None and not self._calls.get(id(client))
            self._changed.notify_all()
        if client is not None and idle:
            client.close()

    def _enter(self, num_transfers: int, timeout_s: float) -> Client | None:
        def has_room() -> bool:
            return self._client is None or self._num_transfers + num_transfers <= self._max_transfers

        with self._changed:
            if num_transfers > self._max_transfers or not self._changed.wait_for(has_room, timeout_s):
                self.num_crowded += 1
                return None
            client = self._client
            if client is not None:
                self._num_transfers += num_transfers
                self._calls[id(client)] = self._calls.get(id(client), 0) + 1
            return client

    def _leave(self, client: Client, num_transfers: int) -> None:
        with self._changed:
            self._num_transfers -= num_transfers
            self._calls[id(client)] -= 1
            last = not self._calls[id(client)]
            if last:
                del self._calls[id(client)]
            is_old = client is not self._client
            self._changed.notify_all()
        if last and is_old:
            client.close()


def _register(client: Client, memory: tuple[int, int]) -> None:
    status = client.register_buffer(*memory)
    if status:
        raise StoreUnavailable(f"Mooncake cannot register {memory[1]} bytes of memory: code {status}")
