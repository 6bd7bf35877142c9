"""The store over Mooncake: one client per process, over TCP or RDMA."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.base import Buffers, GetResult, PutResult, Store, total_size
from epd.cache.stores.mooncake_client import MAX_TRANSFERS, Client, ClientSlot
from epd.cache.stores.mooncake_library import import_store

# Codes of the library, as measured with 0.3.13.
_ABSENT = -704
_NOT_READY = -703
_TOO_LONG = -600
_NO_SPACE = -200
_TRANSFER_FAILED = -800

_MAX_TRANSFER_FAILURES = 3
_STUCK_TIMEOUTS = 5
_LOCAL_BUFFER_BYTES = 16 << 20  # serves calls that are not made here; the library wants some


class MooncakeStore:
    """Objects in the segments that clients of one master have mounted; this client mounts none.

    An object that cannot be read is removed: until the master forgets a dead owner (`client_ttl`), it takes
    a put of what lay there for done, and readers would find nothing again and again.

    After `_MAX_TRANSFER_FAILURES` calls in a row with failed transfers, or one that was stuck as well, a
    new client takes the old one's place.
    """

    def __init__(
        self,
        master: str,
        *,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        timeout_s: float = 2.0,
        connect: Callable[[], Client] | None = None,
        max_transfers: int = MAX_TRANSFERS,
    ) -> None:
        """Raises StoreUnavailable when the library or the master is not there.

        master: host:port. host: address of this host for others. protocol: tcp or rdma. device: RDMA
        devices, comma-separated. timeout_s: how long a call waits its turn. connect: makes a client.
        """

        def connect_library() -> Client:
            return _connect(host, protocol, device, master)

        self._timeout_s = timeout_s
        self._max_transfers = max_transfers
        self._slot = ClientSlot(connect or connect_library, max_transfers=max_transfers)
        self._num_failures = 0

    def register(self, memory: torch.Tensor) -> None:
        self._slot.register(memory.data_ptr(), memory.nbytes)

    def near(self) -> Store | None:
        return None

    def exists(self, keys: Sequence[str]) -> list[bool]:
        with self._slot.use(0, self._timeout_s) as client:
            codes = client.batch_is_exist(list(keys)) if client else [0] * len(keys)
        return [code == 1 for code in codes]

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[GetResult]:
        codes = self._transfer(_get, keys, buffers)
        unreadable = [key for key, code in zip(keys, codes, strict=True) if code == _TRANSFER_FAILED]
        if unreadable:
            self.remove(unreadable)
        return [get_result(code, total_size(item)) for code, item in zip(codes, buffers, strict=True)]

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[PutResult]:
        results = [put_result(code) for code in self._transfer(_put, keys, buffers)]
        # The library also takes for done what another has begun to put, and perhaps died over. The question
        # grants a lease as well, so that the object is there when it is read next.
        for index, there in enumerate(self.exists(keys)):
            if results[index] is PutResult.STORED and not there:
                results[index] = PutResult.BUSY
        return results

    def remove(self, keys: Sequence[str]) -> None:
        with self._slot.use(0, self._timeout_s) as client:
            if client:
                client.batch_remove(list(keys), True)

    def stats(self) -> dict[str, int]:
        return {"mooncake_rebuilds": self._slot.num_rebuilds, "mooncake_crowded": self._slot.num_crowded}

    def close(self) -> None:
        self._slot.close()

    def _transfer(
        self,
        call: Callable[[Client, list[str], Sequence[Buffers]], list[int]],
        keys: Sequence[str],
        buffers: Sequence[Buffers],
    ) -> list[int | None]:
        """The library's code of each key, None for keys whose turn did not come."""
        codes: list[int | None] = []
        for begin, end in self._portions(buffers):
            started = time.monotonic()
            with self._slot.use(sum(map(len, buffers[begin:end])), self._timeout_s) as client:
                if client is None:
                    codes += [None] * (end - begin)
                    continue
                some = call(client, list(keys[begin:end]), buffers[begin:end])
            codes += some
            self._watch(_TRANSFER_FAILED in some, time.monotonic() - started)
        return codes

    def _portions(self, buffers: Sequence[Buffers]) -> Iterator[tuple[int, int]]:
        """Index ranges of keys whose runs together stay within the transfers allowed."""
        begin = num_runs = 0
        for end, item in enumerate(buffers):
            if end > begin and num_runs + len(item) > self._max_transfers:
                yield begin, end
                begin, num_runs = end, 0
            num_runs += len(item)
        if begin < len(buffers):
            yield begin, len(buffers)

    def _watch(self, failed: bool, duration_s: float) -> None:
        """Has the client replaced once its transfers fail again and again."""
        self._num_failures = self._num_failures + 1 if failed else 0
        stuck = failed and duration_s > _STUCK_TIMEOUTS * self._timeout_s
        if stuck or self._num_failures >= _MAX_TRANSFER_FAILURES:
            self._num_failures = 0
            self._slot.replace()


def get_result(code: int | None, size: int) -> GetResult:
    """What the library's answer to a get means: anything but the exact size is no hit."""
    if code == size:
        return GetResult.STORE
    if code is None:
        return GetResult.SKIPPED
    if code in (_ABSENT, _NOT_READY):
        return GetResult.ABSENT
    return GetResult.WRONG_SIZE if code >= 0 or code == _TOO_LONG else GetResult.FAILED


def put_result(code: int | None) -> PutResult:
    """What the library's answer to a put means."""
    if code is None:
        return PutResult.SKIPPED
    if code == 0:
        return PutResult.STORED
    return PutResult.FULL if code == _NO_SPACE else PutResult.FAILED


def _get(client: Client, keys: list[str], buffers: Sequence[Buffers]) -> list[int]:
    return client.batch_get_into_multi_buffers(keys, *_split(buffers))


def _put(client: Client, keys: list[str], buffers: Sequence[Buffers]) -> list[int]:
    return client.batch_put_from_multi_buffers(keys, *_split(buffers))


def _split(buffers: Sequence[Buffers]) -> tuple[list[list[int]], list[list[int]]]:
    """Pointers and sizes apart, as the library takes them."""
    pointers = [[pointer for pointer, _ in item] for item in buffers]
    sizes = [[size for _, size in item] for item in buffers]
    return pointers, sizes


def _connect(host: str, protocol: str, device: str, master: str) -> Client:
    client = import_store().MooncakeDistributedStore()
    status = client.setup(host, "P2PHANDSHAKE", 0, _LOCAL_BUFFER_BYTES, protocol, device, master)
    if status:
        raise StoreUnavailable(f"cannot reach the Mooncake master at {master} ({protocol}): code {status}")
    connected: Client = client
    return connected
