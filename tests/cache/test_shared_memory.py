"""The store in a host's memory: whole objects or none, bounded, private, and clean after crashes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.base import GetResult, PutResult
from epd.cache.stores.host_files import file_name, remove_abandoned
from epd.cache.stores.shared_memory import SharedMemoryStore

MIB = 1 << 20


def buffers_of(memory: torch.Tensor, parts: int = 4) -> list[tuple[int, int]]:
    """`memory` in `parts` equal buffers."""
    size = memory.nbytes // parts
    return [(memory.data_ptr() + index * size, size) for index in range(parts)]


def put(store: SharedMemoryStore, key: str, memory: torch.Tensor) -> PutResult:
    return store.put_from([key], [buffers_of(memory)])[0]


def get(store: SharedMemoryStore, key: str, memory: torch.Tensor, parts: int = 2) -> GetResult:
    return store.get_into([key], [buffers_of(memory, parts)])[0]


def test_another_store_of_the_name_reads_what_one_wrote(tmp_path: Path) -> None:
    """Two processes of a host, here two stores, share objects, into other buffers, bit for bit."""
    writer, reader = (SharedMemoryStore("a", MIB, parent=tmp_path) for _ in range(2))
    data, target = torch.randint(0, 256, (5000,), dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    assert put(writer, "k", data) is PutResult.STORED
    assert get(reader, "k", target) is GetResult.HOST
    assert torch.equal(target, data)
    assert reader.exists(["k", "l"]) == [True, False]
    assert get(reader, "l", target) is GetResult.ABSENT


def test_more_buffers_than_one_system_call_takes(tmp_path: Path) -> None:
    """A fragmented object, of more runs than IOV_MAX, goes in and out."""
    store = SharedMemoryStore("a", MIB, parent=tmp_path)
    data, target = torch.randint(0, 256, (9000,), dtype=torch.uint8), torch.zeros(9000, dtype=torch.uint8)
    assert store.put_from(["k"], [buffers_of(data, 3000)]) == [PutResult.STORED]
    assert store.get_into(["k"], [buffers_of(target, 4500)]) == [GetResult.HOST]
    assert torch.equal(target, data)


@pytest.mark.parametrize("size", [999, 1001, 0])
def test_a_file_of_another_size_is_no_hit(tmp_path: Path, size: int) -> None:
    """Shorter, longer and empty files are found to be of the wrong size."""
    store = SharedMemoryStore("a", MIB, parent=tmp_path)
    (tmp_path / "epd-a" / file_name("k")).write_bytes(bytes(size))
    assert get(store, "k", torch.zeros(1000, dtype=torch.uint8)) is GetResult.WRONG_SIZE


def test_a_put_of_a_stored_key_keeps_the_old_bytes_and_a_reader_keeps_its_file(tmp_path: Path) -> None:
    """A live file is neither written nor truncated, and removing it does not disturb who reads it."""
    store = SharedMemoryStore("a", MIB, parent=tmp_path)
    first, second = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    put(store, "k", first)
    with (tmp_path / "epd-a" / file_name("k")).open("rb") as reader:
        assert put(store, "k", second) is PutResult.STORED
        store.remove(["k", "never there"])
        assert put(store, "k", second) is PutResult.STORED
        assert reader.read() == bytes(64)
    target = torch.zeros(64, dtype=torch.uint8)
    get(store, "k", target)
    assert torch.equal(target, second)


def test_the_least_recently_used_is_evicted(tmp_path: Path) -> None:
    """Writes stay within the capacity; what was read lately stays."""
    store = SharedMemoryStore("a", MIB, parent=tmp_path)
    data = torch.zeros(MIB // 8, dtype=torch.uint8)
    for number in range(8):
        assert put(store, str(number), data) is PutResult.STORED
        os.utime(tmp_path / "epd-a" / file_name(str(number)), (number, number))
    assert get(store, "0", data) is GetResult.HOST
    assert put(store, "8", data) is PutResult.STORED
    assert store.exists(["0", "1", "7", "8"]) == [True, False, True, True]
    assert store.stats()["host_evictions"] >= 1


def test_many_writes_stay_within_the_capacity(tmp_path: Path) -> None:
    """With two writers the bound is kept to within what each may not have seen of the other."""
    stores = [SharedMemoryStore("a", MIB, parent=tmp_path) for _ in range(2)]
    data = torch.zeros(8192, dtype=torch.uint8)
    for number in range(400):
        assert put(stores[number % 2], str(number), data) is PutResult.STORED
        used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "epd-a").iterdir())
        assert used <= MIB + 2 * (MIB // 32) + 2 * 8192


def test_an_object_larger_than_the_store_is_refused(tmp_path: Path) -> None:
    """It is FULL and nothing is evicted for it."""
    store = SharedMemoryStore("a", MIB, parent=tmp_path)
    put(store, "small", torch.zeros(64, dtype=torch.uint8))
    assert put(store, "large", torch.zeros(2 * MIB, dtype=torch.uint8)) is PutResult.FULL
    assert store.exists(["small"]) == [True]


def test_files_and_folder_are_private(tmp_path: Path) -> None:
    """0700 and 0600; a folder that others may enter is refused, as is a link."""
    store = SharedMemoryStore("a", MIB, parent=tmp_path)
    put(store, "k", torch.zeros(64, dtype=torch.uint8))
    folder = tmp_path / "epd-a"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
    (tmp_path / "epd-open").mkdir(mode=0o755)
    (tmp_path / "epd-link").symlink_to(folder)
    for name in ("open", "link"):
        with pytest.raises(StoreUnavailable, match="cannot use"):
            SharedMemoryStore(name, MIB, parent=tmp_path)


@pytest.mark.parametrize("capacity", [0, -1, 1 << 60])
def test_a_capacity_that_is_not_there_is_refused(tmp_path: Path, capacity: int) -> None:
    """The message names both sizes and what to do, and no folder is left."""
    with pytest.raises(
        ValueError, match=rf"of {capacity} bytes was asked for, .* has \d+ bytes left.*--shm-size"
    ):
        SharedMemoryStore("a", capacity, parent=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b"])
def test_names_that_are_no_file_names_are_refused(tmp_path: Path, name: str) -> None:
    """A name cannot lead elsewhere."""
    with pytest.raises(ValueError, match="name may hold"):
        SharedMemoryStore(name, MIB, parent=tmp_path)


def test_the_last_to_close_removes_the_folder(tmp_path: Path) -> None:
    """While another process uses it, it stays."""
    stores = [SharedMemoryStore("a", MIB, parent=tmp_path) for _ in range(2)]
    put(stores[0], "k", torch.zeros(64, dtype=torch.uint8))
    stores[0].close()
    assert stores[1].exists(["k"]) == [True]
    stores[1].close()
    assert not list(tmp_path.iterdir())


def test_what_dead_runs_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    """A folder of another name goes when nobody holds it and it is not brand new."""
    for name in ("dead", "young", "alive"):
        (tmp_path / f"epd-{name}").mkdir(mode=0o700)
        (tmp_path / f"epd-{name}" / ".lock").touch()
    (tmp_path / "other").mkdir()
    with (tmp_path / "epd-alive" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        later = time.time() + 3600
        assert remove_abandoned(tmp_path, "epd-", keep=tmp_path / "epd-young", now=later) == [
            tmp_path / "epd-dead"
        ]
        assert not remove_abandoned(tmp_path, "epd-", keep=tmp_path / "epd-x", now=time.time())
    assert {path.name for path in tmp_path.iterdir()} == {"epd-young", "epd-alive", "other"}


WRITER = """
import sys, torch
from pathlib import Path
from epd.cache.stores.shared_memory import SharedMemoryStore
store = SharedMemoryStore("a", 64 << 20, parent=Path(sys.argv[1]))
data = torch.full((4 << 20,), 7, dtype=torch.uint8)
print("ready", flush=True)
number = 0
while True:
    store.put_from([str(number)], [[(data.data_ptr(), data.nbytes)]])
    store.remove([str(number - 3)])
    print(number, flush=True)
    number += 1
"""


def test_a_writer_killed_at_any_byte_leaves_whole_objects_only(tmp_path: Path) -> None:
    """Killed in the middle of its writes, it leaves nothing half written, no lock, and no stray file."""
    reader = SharedMemoryStore("a", 64 << 20, parent=tmp_path)
    folder = tmp_path / "epd-a"
    target = torch.zeros(4 << 20, dtype=torch.uint8)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        for _ in range(20):
            number = writer.stdout.readline().strip().decode()
            result = get(reader, number, target)
            assert result is GetResult.HOST or reader.exists([number]) == [False]
            assert result is not GetResult.HOST or torch.all(target == 7)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()
    files = [file for file in folder.iterdir() if not file.name.startswith(".")]
    assert {file.stat().st_size for file in files} == {4 << 20}
    assert len(files) <= 4
    assert put(reader, "mine", target) is PutResult.STORED
    reader.close()
    assert not folder.exists()


def test_a_full_file_system_costs_a_put_and_nothing_more(tmp_path: Path) -> None:
    """When others have filled the memory since, a put evicts once more and is then FULL; reads go on."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("may not mount a file system of its own")
    try:
        store = SharedMemoryStore("a", MIB // 2, parent=mount)
        small, half = torch.zeros(4096, dtype=torch.uint8), torch.zeros(MIB // 4, dtype=torch.uint8)
        assert put(store, "old", half) is PutResult.STORED
        (mount / "others").write_bytes(bytes(MIB // 2 + MIB // 8))
        assert put(store, "new", half) is PutResult.STORED
        assert store.exists(["old", "new"]) == [False, True]
        (mount / "others2").write_bytes(bytes(MIB // 16))
        store.remove(["new"])
        (mount / "others3").write_bytes(bytes(MIB // 16 * 3))
        assert put(store, "newer", half) is PutResult.FULL
        assert put(store, "small", small) is PutResult.STORED
        assert get(store, "small", small) is GetResult.HOST
        assert store.stats()["host_full"] == 1
        store.close()
    finally:
        subprocess.run(["umount", str(mount)], check=True)
