"""Objects as files in a directory of a memory file system: whole or absent, bounded, shared by processes."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ctypes import c_char
from hashlib import blake2b
from pathlib import Path

from epd.cache.entry import Buffer
from epd.cache.errors import StoreUnavailable

_LOCK_NAME = ".lock"
_MAX_BUFFERS = 1024  # of one readv or writev (IOV_MAX of Linux)
_YOUNG_S = 60.0  # a directory younger than this may belong to a process that has not locked it yet


class HostDirectory:
    """One private directory, locked (shared) by each process that uses it, for as long as it lives.

    A file is written without a name and gets one when it is whole, so a writer that dies
    at any byte leaves nothing behind. It is never written again, only removed: readers that have it open
    keep what they read.
    """

    def __init__(self, path: Path) -> None:
        """Raises StoreUnavailable when there can be no such directory."""
        self.path = path
        try:
            while not self._open():
                pass
        except OSError as error:
            raise StoreUnavailable(f"cannot use {path} for shared memory: {error}") from error

    def _open(self) -> bool:
        """False when another process, the last to use the directory, removed it meanwhile."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with ExitStack() as undo:
            undo.callback(os.close, self._fd)
            status = os.fstat(self._fd)
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise PermissionError(
                    errno.EPERM, "it is open to other users: remove it, or use another name"
                )
            try:
                self._lock = os.open(_LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._fd)
            except FileNotFoundError:
                return False
            undo.callback(os.close, self._lock)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if not os.fstat(self._lock).st_nlink:
                return False
            os.close(os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600, dir_fd=self._fd))
            undo.pop_all()
        return True

    def exists(self, key: str) -> bool:
        try:
            os.stat(file_name(key), dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def read(self, key: str, buffers: list[Buffer], size: int) -> bool:
        """Fills the buffers; False when the file has another size. Raises FileNotFoundError, OSError."""
        fd = os.open(file_name(key), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._fd)
        try:
            if os.fstat(fd).st_size != size:
                return False
            offset = 0
            for views in _batches(buffers):
                offset += os.preadv(fd, views, offset)
            os.utime(fd)
            return offset == size
        finally:
            os.close(fd)

    def write(self, key: str, buffers: list[Buffer], size: int) -> None:
        """Makes the file, unless there is one. Raises OSError (ENOSPC: no room)."""
        fd = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o600, dir_fd=self._fd)
        try:
            offset = 0
            for views in _batches(buffers):
                offset += os.pwritev(fd, views, offset)
            if offset != size:
                raise OSError(errno.ENOSPC, f"{offset} of {size} bytes were written")
            os.link(
                f"/proc/self/fd/{fd}",
                file_name(key),
                src_dir_fd=self._fd,
                dst_dir_fd=self._fd,
                follow_symlinks=True,
            )
        except FileExistsError:
            pass
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def files(self) -> list[tuple[float, str, int]]:
        """`(time of last use, name, bytes)` of each file, in no order."""
        found = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append((status.st_mtime, entry.name, status.st_blocks * 512))
        return found

    def free_bytes(self) -> int:
        """Room left in the file system."""
        status = os.fstatvfs(self._fd)
        return status.f_bavail * status.f_frsize

    @contextmanager
    def evicting(self) -> Iterator[bool]:
        """Whether this process may evict now: one at a time does. The lock dies with its process."""
        fd = os.open(".evicting", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self._fd)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(fd)

    def close(self) -> None:
        """Lets go of the directory; the last process to do so removes it."""
        if is_unused(self._lock):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        os.close(self._fd)


def file_name(key: str) -> str:
    """Safe for any key, and of one length."""
    return blake2b(key.encode(), digest_size=32).hexdigest()


def is_unused(lock: int) -> bool:
    """Whether no other process holds the lock; if so it is held, exclusively, until `lock` is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_abandoned(parent: Path, prefix: str, keep: Path, now: float) -> list[Path]:
    """Removes directories of this user, named `prefix...`, that no process holds any more; returns them.

    now: seconds since the epoch. A folder younger than a minute may not be locked yet, and stays.
    """
    removed = []
    for path in parent.glob(f"{prefix}*"):
        try:
            status = path.lstat()
            if path == keep or not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if now - status.st_ctime < _YOUNG_S:
                continue
            lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if is_unused(lock):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
        finally:
            os.close(lock)
    return removed


def _batches(buffers: list[Buffer]) -> Iterator[list[memoryview]]:
    views = [memoryview((c_char * size).from_address(pointer)).cast("B") for pointer, size in buffers]
    for at in range(0, len(views), _MAX_BUFFERS):
        yield views[at : at + _MAX_BUFFERS]
