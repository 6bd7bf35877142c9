"""Memory of the host in front of a store that is farther away."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.cache.stores.base import Buffers, GetResult, PutResult, Store


class TieredStore:
    """Reads ask `host` first and write what came from `far` to it; writes go to both.

    A write's result is that of `far`, the one that readers everywhere have. A host store that holds a
    damaged object hides the good one of `far` until the damage is found, removed and made anew.
    """

    def __init__(self, host: Store, far: Store) -> None:
        self._host = host
        self._far = far

    def register(self, memory: torch.Tensor) -> None:
        self._host.register(memory)
        self._far.register(memory)

    def near(self) -> Store | None:
        return self._host

    def exists(self, keys: Sequence[str]) -> list[bool]:
        found = self._host.exists(keys)
        absent = [i for i, there in enumerate(found) if not there]
        if absent:
            for i, there in zip(absent, self._far.exists([keys[i] for i in absent]), strict=True):
                found[i] = there
        return found

    def get_into(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[GetResult]:
        results = self._host.get_into(keys, buffers)
        damaged = [key for key, result in zip(keys, results, strict=True) if result is GetResult.WRONG_SIZE]
        if damaged:
            self._host.remove(damaged)  # else what comes from afar could not take its place
        absent = [i for i, result in enumerate(results) if not result.is_hit]
        if not absent:
            return results
        fetched = self._far.get_into([keys[i] for i in absent], [buffers[i] for i in absent])
        for i, result in zip(absent, fetched, strict=True):
            results[i] = result
        arrived = [i for i in absent if results[i].is_hit]
        if arrived:
            self._host.put_from([keys[i] for i in arrived], [buffers[i] for i in arrived])
        return results

    def put_from(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[PutResult]:
        self._host.put_from(keys, buffers)
        return self._far.put_from(keys, buffers)

    def remove(self, keys: Sequence[str]) -> None:
        self._host.remove(keys)
        self._far.remove(keys)

    def stats(self) -> dict[str, int]:
        return {**self._host.stats(), **self._far.stats()}

    def close(self) -> None:
        self._host.close()
        self._far.close()
