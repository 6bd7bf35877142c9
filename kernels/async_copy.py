"""The handle of a submitted transfer, and what is kept alive until it ends."""

from __future__ import annotations

from threading import Lock
from typing import Any, Literal, Protocol

import torch

TransferPath = Literal["batch", "ranges", "copy_"]


class CopyEvent(Protocol):
    """What is used of `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CopyStream(Protocol):
    """What is used of `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> None: ...


class AsyncCopy:
    """A submitted transfer of rows. Until it is done, write neither side and do not read the destination.

    Both tensors stay alive until then: the device's through the allocator (`record_stream`), the host's
    through this module, also when the handle is dropped.
    """

    def __init__(
        self,
        path: TransferPath,
        event: CopyEvent | None = None,
        src: torch.Tensor | None = None,
        dst: torch.Tensor | None = None,
    ) -> None:
        self.path = path
        """The way the copies went."""
        self._event = event
        self._tensors = tuple(t for t in (src, dst) if t is not None)
        if event is not None:
            host_memory.keep(event, tuple(t for t in self._tensors if not t.is_cuda))

    def done(self) -> bool:
        """Whether the copies have ended. Does not block."""
        event = self._event
        if event is not None and event.query():
            self._let_go()
        return self._event is None

    def wait(self) -> None:
        """Blocks the calling thread until the copies have ended."""
        event = self._event
        if event is not None:
            event.synchronize()
            self._let_go()

    def wait_stream(self, stream: CopyStream | None = None) -> None:
        """Makes later work of `stream` wait for the copies, without blocking the host.

        Default: the current stream of the device that takes part.
        """
        event, tensors = self._event, self._tensors
        if event is None:
            return
        (stream or _current_stream(tensors)).wait_event(event)

    def _let_go(self) -> None:
        self._event = None
        self._tensors = ()
        host_memory.release_finished()


def _current_stream(tensors: tuple[torch.Tensor, ...]) -> CopyStream:
    return torch.cuda.current_stream(next(t.device for t in tensors if t.is_cuda))


class HostMemory:
    """Host tensors of copies in flight. torch's pinned allocator does not know of the driver's own copies.

    What a dropped handle leaves here goes with the next transfer that starts or is seen to end.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: list[tuple[CopyEvent, tuple[torch.Tensor, ...]]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, event: CopyEvent, tensors: tuple[torch.Tensor, ...]) -> None:
        """Holds `tensors` until `event` has happened."""
        self.release_finished()
        with self._lock:
            self._kept.append((event, tensors))

    def release_finished(self) -> None:
        """Lets go of all whose event has happened."""
        with self._lock:
            self._kept = [entry for entry in self._kept if not entry[0].query()]


host_memory = HostMemory()
