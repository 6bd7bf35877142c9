"""What Ingress remembers and asks of the store's content."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from epd.deployments.directory import StoreDirectory


class FakeStore:
    """has: the keys that are stored. error: raised instead of an answer. gate: closed while it hangs."""

    def __init__(self, *has: str) -> None:
        self.has = set(has)
        self.asked: list[list[str]] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        self.asked.append(list(keys))
        self.gate.wait()
        if self.error is not None:
            raise self.error
        return [key in self.has for key in keys]

    def close(self) -> None: ...


def make(store: FakeStore, timeout_s: float = 30, max_known: int = 3) -> StoreDirectory:
    return StoreDirectory(store, timeout_s=timeout_s, max_known=max_known)


async def test_unseen_keys_are_asked_for_together() -> None:
    """One call names all keys never seen; those that the store lacks are absent."""
    store = FakeStore("b")
    directory = make(store)
    assert await directory.absent(["a", "b", "c"]) == ["a", "c"]
    assert store.asked == [["a", "b", "c"]]
    directory.close()


async def test_known_keys_are_not_asked_for() -> None:
    """What an answered request used counts as stored until it is forgotten."""
    store = FakeStore()
    directory = make(store)
    directory.remember(["a"])
    assert await directory.absent(["a"]) == []
    assert store.asked == []
    directory.forget(["a"])
    assert await directory.absent(["a"]) == ["a"]
    directory.close()


async def test_the_least_recently_used_is_dropped_first() -> None:
    """Memory is bounded; using a key keeps it."""
    directory = make(FakeStore())
    directory.remember(["a", "b", "c"])
    await directory.absent(["a"])
    directory.remember(["d"])
    assert directory.num_known == 3
    assert await directory.absent(["a", "b", "c", "d"]) == ["b"]
    directory.close()


async def test_a_store_that_fails_says_nothing() -> None:
    """When the store cannot be asked every key may be there: the embedder will see."""
    store = FakeStore()
    store.error = RuntimeError("broken")
    directory = make(store)
    assert await directory.absent(["a"]) == []
    directory.close()


async def test_a_store_that_hangs_costs_its_timeout_only() -> None:
    """A call that does not come back is waited for no longer than `timeout_s`, and gathers no queue."""
    store = FakeStore()
    store.gate.clear()
    directory = make(store, timeout_s=0.01)
    for _ in range(20):
        assert await directory.absent(["a"]) == []
    store.gate.set()
    directory.close()
    assert 1 <= len(store.asked) <= 10
