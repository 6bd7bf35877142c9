"""Stand-ins for stores, with knobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove, string_at
from threading import Event, Lock

import torch

from epd.cache.stores.base import Buffers, GetResult, PutResult, Store, total_size


class FakeStore:
    """Objects in a dict, which tests may change. While a gate is cleared, calls of its kind do not end."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_failing = False
        self.get_gate = Event()
        self.put_gate = Event()
        self.get_gate.set()
        self.put_gate.set()
        self.get_calls: list[list[str]] = []
        self.put_calls: list[list[str]] = []
        self.removed: list[str] = []
        self.registered: list[torch.Tensor] = []
        self.is_closed = False
        self.on_get: Callable[[], None] = lambda: None
        self.on_put: Callable[[], None] = lambda: None
        self._lock = Lock()

    def register(self, memory: torch.Tensor) -> None:
        self.registered.append(memory)

    def near(self) -> Store | None:
        return None

    def exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.objects for key in keys]

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[GetResult]:
        with self._lock:
            self.get_calls.append(list(keys))
        self.on_get()
        self.get_gate.wait()
        return [self._get(key, item) for key, item in zip(keys, buffers, strict=True)]

    def _get(self, key: str, buffers: Buffers) -> GetResult:
        if self.is_failing:
            return GetResult.FAILED
        data = self.objects.get(key)
        if data is None:
            return GetResult.ABSENT
        if len(data) != total_size(buffers):
            return GetResult.WRONG_SIZE
        offset = 0
        for pointer, size in buffers:
            memmove(pointer, data[offset : offset + size], size)
            offset += size
        return GetResult.STORE

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[PutResult]:
        with self._lock:
            self.put_calls.append(list(keys))
        self.on_put()
        self.put_gate.wait()
        if self.is_failing:
            return [PutResult.FAILED] * len(keys)
        for key, item in zip(keys, buffers, strict=True):
            self.objects.setdefault(key, b"".join(string_at(pointer, size) for pointer, size in item))
        return [PutResult.STORED] * len(keys)

    def remove(self, keys: Sequence[str]) -> None:
        self.removed += keys
        for key in keys:
            self.objects.pop(key, None)

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.is_closed = True
