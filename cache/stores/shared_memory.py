"""A store in the memory of one host, shared by its processes. No server."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import torch

from epd.cache.stores.base import Buffers, GetResult, PutResult, Store, total_size
from epd.cache.stores.host_files import HostDirectory, file_name, remove_abandoned

logger = logging.getLogger(__name__)

_PREFIX = "epd-"
_SCANS_PER_FILL = 32


class SharedMemoryStore:
    """Objects as files in `{parent}/epd-{name}`; the least recently used go when `capacity_bytes` are full.

    Each process counts what it writes and looks at the directory after every 1/32 of the capacity, so
    the bound is kept to within that much per writing process. Files are readable by this user alone.
    """

    def __init__(self, name: str, capacity_bytes: int, *, parent: Path = Path("/dev/shm")) -> None:
        """Removes what dead runs of other names left. Raises ValueError when the host has not the room."""
        if not name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"the store's name may hold letters, digits, - and _ only, got {name!r}")
        path = parent / f"{_PREFIX}{name}"
        self._directory = HostDirectory(path)
        self._capacity = capacity_bytes
        self._lock = Lock()
        self._written = 0
        self._counts = {"host_evictions": 0, "host_full": 0}
        remove_abandoned(parent, _PREFIX, keep=path, now=time.time())
        self._used = self._scan()
        room = self._directory.free_bytes() + self._used
        if not 0 < capacity_bytes <= room:
            self._directory.close()
            raise ValueError(
                f"a shared-memory store of {capacity_bytes} bytes was asked for, {parent} has {room} bytes "
                "left: ask for less, or give the host or container more (--shm-size, a Memory volume)"
            )

    def register(self, memory: torch.Tensor) -> None:
        """Nothing to do: files are read into any memory."""

    def near(self) -> Store | None:
        return self

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [self._directory.exists(key) for key in keys]

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[GetResult]:
        return [self._get(key, item) for key, item in zip(keys, buffers, strict=True)]

    def _get(self, key: str, buffers: Buffers) -> GetResult:
        try:
            whole = self._directory.read(key, list(buffers), total_size(buffers))
        except FileNotFoundError:
            return GetResult.ABSENT
        except OSError as error:
            logger.warning("shared memory: cannot read an object: %s", error)
            return GetResult.FAILED
        return GetResult.HOST if whole else GetResult.WRONG_SIZE

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[PutResult]:
        return [self._put(key, item) for key, item in zip(keys, buffers, strict=True)]

    def _put(self, key: str, buffers: Buffers) -> PutResult:
        size = total_size(buffers)
        if size > self._capacity:
            return PutResult.FULL
        try:
            if self._directory.exists(key):
                return PutResult.STORED
            self._make_room(size)
            try:
                self._directory.write(key, list(buffers), size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                self._evict(self._scan() - max(2 * size, self._capacity // _SCANS_PER_FILL))
                self._directory.write(key, list(buffers), size)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                with self._lock:
                    self._counts["host_full"] += 1
                return PutResult.FULL
            logger.warning("shared memory: cannot write an object: %s", error)
            return PutResult.FAILED
        return PutResult.STORED

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._directory.remove(file_name(key))

    def stats(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        self._directory.close()

    def _make_room(self, size: int) -> None:
        """Counts `size` bytes more; when it is time, looks at the directory and evicts if it is too full."""
        with self._lock:
            self._written += size
            if self._written <= self._capacity // _SCANS_PER_FILL and self._used + size <= self._capacity:
                self._used += size
                return
            self._written = 0
        used = self._scan()
        if used + size > self._capacity:
            used = self._evict(self._capacity - max(size, self._capacity // _SCANS_PER_FILL))
        with self._lock:
            self._used = used + size

    def _scan(self) -> int:
        return sum(size for _, _, size in self._directory.files())

    def _evict(self, target: int) -> int:
        """Removes the least recently used files down to `target` bytes; says how many bytes are left."""
        with self._directory.evicting() as mine:
            files = sorted(self._directory.files())
            used = sum(size for _, _, size in files)
            evicted = 0
            while mine and used > target and evicted < len(files):
                _, name, size = files[evicted]
                self._directory.remove(name)
                used -= size
                evicted += 1
        with self._lock:
            self._counts["host_evictions"] += evicted
        return used
