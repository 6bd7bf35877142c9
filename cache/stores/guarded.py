"""A store behind a circuit breaker."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.cache.breaker import CircuitBreaker
from epd.cache.stores.base import Buffers, GetResult, PutResult, Store


class GuardedStore:
    """Asks `store` only while its breaker lets calls through; otherwise every key is SKIPPED."""

    def __init__(self, store: Store, breaker: CircuitBreaker) -> None:
        self._store = store
        self._breaker = breaker

    def register(self, memory: torch.Tensor) -> None:
        self._store.register(memory)

    def near(self) -> Store | None:
        return self._store.near()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        call = self._breaker.admit()
        if call is None:
            return [False] * len(keys)
        failed = True
        try:
            found = self._store.exists(keys)
            failed = False
        finally:
            self._breaker.report(call, failed=failed)
        return found

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[GetResult]:
        call = self._breaker.admit()
        if call is None:
            return [GetResult.SKIPPED] * len(keys)
        failed = True
        try:
            results = self._store.get_into(keys, buffers)
            failed = GetResult.FAILED in results
        finally:
            self._breaker.report(call, failed=failed)
        return results

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[PutResult]:
        call = self._breaker.admit()
        if call is None:
            return [PutResult.SKIPPED] * len(keys)
        failed = True
        try:
            results = self._store.put_from(keys, buffers)
            failed = PutResult.FAILED in results
        finally:
            self._breaker.report(call, failed=failed)
        return results

    def remove(self, keys: Sequence[str]) -> None:
        call = self._breaker.admit()
        if call is None:
            return
        failed = True
        try:
            self._store.remove(keys)
            failed = False
        finally:
            self._breaker.report(call, failed=failed)

    def stats(self) -> dict[str, int]:
        return {**self._store.stats(), "breaker_state": int(self._breaker.state)}

    def close(self) -> None:
        self._store.close()
