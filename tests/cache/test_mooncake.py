"""The Mooncake store over a client that does as the library was seen to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from ctypes import memmove, string_at
from pathlib import Path
from threading import Event, Thread

import pytest
import torch

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.base import GetResult, PutResult
from epd.cache.stores.mooncake import MooncakeStore, get_result, put_result
from epd.cache.stores.mooncake_library import import_store, master_path


class FakeClient:
    """Objects in a dict shared by clients. A call after close fails the test, as it would end the process."""

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.is_closed = False
        self.code: int | None = None
        self.registered: list[tuple[int, int]] = []
        self.batches: list[int] = []
        self.removed: list[str] = []
        self.begun: set[str] = set()
        """Keys that a dead writer has begun to put."""
        self.on_call: Callable[[], None] = lambda: None

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        self.registered.append((buffer_ptr, size))
        return self.code or 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self._called()
        return [int(key in self.objects) for key in keys]

    def batch_get_into_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        self._called(sum(map(len, all_sizes)))
        return [
            self._get(key, ptrs, sizes)
            for key, ptrs, sizes in zip(keys, all_buffer_ptrs, all_sizes, strict=True)
        ]

    def _get(self, key: str, pointers: list[int], sizes: list[int]) -> int:
        data = self.objects.get(key)
        if key in self.begun:
            return -703
        if self.code is not None or data is None:
            return self.code or -704
        if len(data) != sum(sizes):
            return -600 if len(data) > sum(sizes) else -800
        at = 0
        for pointer, size in zip(pointers, sizes, strict=True):
            memmove(pointer, data[at : at + size], size)
            at += size
        return at

    def batch_put_from_multi_buffers(
        self, keys: list[str], all_buffer_ptrs: list[list[int]], all_sizes: list[list[int]]
    ) -> list[int]:
        self._called(sum(map(len, all_sizes)))
        for key, pointers, sizes in zip(keys, all_buffer_ptrs, all_sizes, strict=True):
            if self.code is None and key not in self.begun:
                self.objects[key] = b"".join(map(string_at, pointers, sizes))
        return [self.code or 0] * len(keys)

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        self._called()
        assert force, "objects under lease would stay"
        self.removed += keys
        return [0 if self.objects.pop(key, None) else -704 for key in keys]

    def close(self) -> int:
        assert not self.is_closed, "closed twice"
        self.is_closed = True
        return 0

    def _called(self, num_runs: int = 0) -> None:
        assert not self.is_closed, "a call after close"
        self.batches.append(num_runs)
        self.on_call()


class FakeCluster:
    """Makes clients of one set of objects, and remembers them."""

    def __init__(self) -> None:
        self.clients: list[FakeClient] = []
        self.is_down = False

    def connect(self) -> FakeClient:
        if self.is_down:
            raise StoreUnavailable("down")
        self.clients.append(FakeClient(self.clients[0].objects if self.clients else None))
        return self.clients[-1]


def make_store(cluster: FakeCluster, *, max_transfers: int = 1000) -> tuple[MooncakeStore, torch.Tensor]:
    store = MooncakeStore("master", timeout_s=0.02, connect=cluster.connect, max_transfers=max_transfers)
    memory = torch.arange(100, dtype=torch.uint8)
    store.register(memory)
    return store, memory


def runs(memory: torch.Tensor, count: int) -> list[tuple[int, int]]:
    """`count` buffers of 2 bytes."""
    return [(memory.data_ptr() + 4 * index, 2) for index in range(count)]


def test_objects_come_back_into_other_runs() -> None:
    """What was put from some runs is read into others of the same total."""
    store, memory = make_store(FakeCluster())
    assert store.put_from(["a"], [runs(memory, 3)]) == [PutResult.STORED]
    target = torch.zeros(6, dtype=torch.uint8)
    buffers = [(target.data_ptr(), 4), (target.data_ptr() + 4, 2)]
    assert store.get_into(["a", "b"], [buffers, buffers]) == [GetResult.STORE, GetResult.ABSENT]
    assert target.tolist() == [0, 1, 4, 5, 8, 9]
    assert store.exists(["a", "b"]) == [True, False]


@pytest.mark.parametrize(
    ("code", "result"),
    [
        (6, GetResult.STORE),
        (5, GetResult.WRONG_SIZE),
        (7, GetResult.WRONG_SIZE),
        (0, GetResult.WRONG_SIZE),
        (-600, GetResult.WRONG_SIZE),
        (-704, GetResult.ABSENT),
        (-703, GetResult.ABSENT),
        (-707, GetResult.FAILED),
        (-800, GetResult.FAILED),
        (-900, GetResult.FAILED),
        (None, GetResult.SKIPPED),
    ],
)
def test_only_the_exact_size_is_a_hit(code: int | None, result: GetResult) -> None:
    """Every other answer of the library is a miss, and says of which kind."""
    assert get_result(code, 6) is result


@pytest.mark.parametrize(
    ("code", "result"),
    [(0, PutResult.STORED), (-200, PutResult.FULL), (-800, PutResult.FAILED), (None, PutResult.SKIPPED)],
)
def test_what_a_put_answers(code: int | None, result: PutResult) -> None:
    """Only 0 means stored."""
    assert put_result(code) is result


def test_memory_is_registered_once_per_process() -> None:
    """A second registration is refused."""
    cluster = FakeCluster()
    store, memory = make_store(cluster)
    with pytest.raises(ValueError, match="registered already"):
        store.register(memory)
    assert cluster.clients[0].registered == [(memory.data_ptr(), 100)]


def test_memory_that_cannot_be_registered_is_an_error_at_the_start() -> None:
    """Serving without would fail every transfer."""
    cluster = FakeCluster()
    store = MooncakeStore("master", connect=cluster.connect)
    cluster.clients[0].code = -1
    with pytest.raises(StoreUnavailable, match="cannot register"):
        store.register(torch.zeros(4, dtype=torch.uint8))


def test_no_call_reaches_the_library_after_close() -> None:
    """Gets, puts and the rest are answered without it, and close may be called twice."""
    cluster = FakeCluster()
    store, memory = make_store(cluster)
    store.close()
    store.close()
    assert store.get_into(["a"], [runs(memory, 1)]) == [GetResult.SKIPPED]
    assert store.put_from(["a"], [runs(memory, 1)]) == [PutResult.SKIPPED]
    assert store.exists(["a"]) == [False]
    store.remove(["a"])
    assert cluster.clients[0].is_closed
    assert not cluster.clients[0].batches


def test_a_close_during_a_call_waits_for_its_end() -> None:
    """The last call that uses the client closes it."""
    cluster = FakeCluster()
    store, memory = make_store(cluster)
    client = cluster.clients[0]
    began, gate = Event(), Event()

    def block() -> None:
        began.set()
        gate.wait()

    client.on_call = block
    call = Thread(target=store.put_from, args=(["a"], [runs(memory, 1)]), daemon=True)
    call.start()
    began.wait()
    store.close()
    assert not client.is_closed
    gate.set()
    call.join()
    assert client.is_closed


def test_a_large_batch_goes_in_portions() -> None:
    """No call has more runs than may be in flight; keys keep their order."""
    cluster = FakeCluster()
    store, memory = make_store(cluster, max_transfers=5)
    items = [runs(memory, count) for count in (2, 3, 1, 4, 4)]
    assert store.put_from(list("abcde"), items) == [PutResult.STORED] * 5
    assert [batch for batch in cluster.clients[0].batches if batch] == [5, 5, 4]
    assert store.get_into(list("abcde"), items) == [GetResult.STORE] * 5


def test_an_object_of_too_many_runs_is_not_moved() -> None:
    """It would wedge the client: skipped, counted, and its neighbours are served."""
    store, memory = make_store(FakeCluster(), max_transfers=5)
    items = [runs(memory, count) for count in (2, 6, 1)]
    assert store.put_from(list("abc"), items) == [PutResult.STORED, PutResult.SKIPPED, PutResult.STORED]
    assert store.stats()["mooncake_crowded"] == 1


def test_transfers_in_flight_are_bounded_over_all_threads() -> None:
    """A call that would exceed the bound waits, and is skipped when its turn does not come in time."""
    cluster = FakeCluster()
    store, memory = make_store(cluster, max_transfers=5)
    client = cluster.clients[0]
    began, gate = Event(), Event()

    def block() -> None:
        began.set()
        gate.wait()

    client.on_call = block
    call = Thread(target=store.put_from, args=(["a"], [runs(memory, 4)]), daemon=True)
    call.start()
    began.wait()
    assert store.get_into(["a"], [runs(memory, 2)]) == [GetResult.SKIPPED]
    gate.set()
    call.join()
    assert store.get_into(["a"], [runs(memory, 4)]) == [GetResult.STORE]


def test_the_client_is_rebuilt_after_failed_transfers_in_a_row() -> None:
    """The new one has the memory registered and serves; the old one is closed."""
    cluster = FakeCluster()
    store, memory = make_store(cluster)
    cluster.clients[0].code = -800
    for _ in range(3):
        assert store.get_into(["a"], [runs(memory, 1)]) == [GetResult.FAILED]
    assert cluster.clients[0].is_closed
    assert store.put_from(["a"], [runs(memory, 1)]) == [PutResult.STORED]
    assert cluster.clients[1].registered == [(memory.data_ptr(), 100)]
    assert store.stats()["mooncake_rebuilds"] == 1


def test_the_old_client_stays_when_there_is_no_new_one() -> None:
    """While the master is down rebuilding fails; the old client serves when it can again."""
    cluster = FakeCluster()
    store, memory = make_store(cluster)
    cluster.is_down = True
    cluster.clients[0].code = -800
    for _ in range(6):
        store.put_from(["a"], [runs(memory, 1)])
    cluster.clients[0].code = None
    assert store.put_from(["a"], [runs(memory, 1)]) == [PutResult.STORED]
    assert store.stats()["mooncake_rebuilds"] == 0


def test_an_object_that_cannot_be_read_is_removed() -> None:
    """Else a put of it would be taken for done while its owner is dead."""
    cluster = FakeCluster()
    store, memory = make_store(cluster)
    store.put_from(["a"], [runs(memory, 1)])
    cluster.clients[0].code = -800
    store.get_into(["a"], [runs(memory, 1)])
    assert cluster.clients[0].removed == ["a"]


def test_a_put_that_a_dead_writer_began_is_not_taken_for_stored() -> None:
    """The library answers 0 to a put of such a key; readers would find nothing."""
    cluster = FakeCluster()
    store, memory = make_store(cluster)
    cluster.clients[0].begun.add("a")
    items = [runs(memory, 1)] * 2
    assert store.put_from(["a", "b"], items) == [PutResult.BUSY, PutResult.STORED]
    assert store.get_into(["a", "b"], items) == [GetResult.ABSENT, GetResult.STORE]


def test_a_missing_system_library_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An import that fails in the loader is an error at the start that names Debian's packages."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    for name in ("mooncake", "mooncake.store"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        StoreUnavailable, match=r"libibverbs\.so\.1.*apt-get install .*libibverbs1 librdmacm1"
    ):
        import_store()
    with pytest.raises(StoreUnavailable, match="has no mooncake_master"):
        master_path()
