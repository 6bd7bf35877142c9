"""The handle of a transfer: when it is done, and what it keeps alive. Events are fakes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from epd.kernels.async_copy import AsyncCopy, host_memory


class FakeEvent:
    """An event that happens when told to, or when waited for."""

    def __init__(self) -> None:
        self.happened = False
        self.waited = 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited += 1
        self.happened = True


class FakeStream:
    """A stream that records what it waits for."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


def test_handle_without_an_event_is_done() -> None:
    """A copy that ended before it returned has nothing to wait for."""
    copy, stream = AsyncCopy("copy_"), FakeStream()
    copy.wait()
    copy.wait_stream(stream)
    assert copy.done()
    assert stream.waits == []


def test_done_follows_the_event() -> None:
    """done() asks the event and does not block."""
    event = FakeEvent()
    copy = AsyncCopy("batch", event, torch.zeros(1, 1), torch.zeros(1, 1))
    assert not copy.done()
    event.happened = True
    assert copy.done()
    assert event.waited == 0


def test_wait_blocks_once() -> None:
    """wait() synchronises with the event; afterwards there is nothing to wait for."""
    event = FakeEvent()
    copy = AsyncCopy("batch", event, torch.zeros(1, 1), torch.zeros(1, 1))
    copy.wait()
    copy.wait()
    assert copy.done()
    assert event.waited == 1


def test_wait_stream_does_not_block() -> None:
    """wait_stream() leaves the waiting to the stream."""
    event, stream = FakeEvent(), FakeStream()
    copy = AsyncCopy("batch", event, torch.zeros(1, 1), torch.zeros(1, 1))
    copy.wait_stream(stream)
    assert stream.waits == [event]
    assert (copy.done(), event.waited) == (False, 0)
    copy.wait()


def test_tensors_live_until_done() -> None:
    """The handle holds both tensors, and lets go once the copies have ended."""
    event, tensor = FakeEvent(), torch.zeros(1, 1)
    copy = AsyncCopy("batch", event, tensor, torch.zeros(1, 1))
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    copy.wait()
    gc.collect()
    assert alive() is None


def test_host_memory_outlives_a_dropped_handle() -> None:
    """Memory that the driver still reads stays although nobody holds the handle, until a later transfer."""
    event, tensor = FakeEvent(), torch.zeros(1, 1)
    AsyncCopy("batch", event, tensor, torch.zeros(1, 1))
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    AsyncCopy("copy_").wait()
    event.happened = True
    AsyncCopy("batch", FakeEvent(), torch.zeros(1, 1), torch.zeros(1, 1)).wait()
    gc.collect()
    assert alive() is None
    assert len(host_memory) == 0
