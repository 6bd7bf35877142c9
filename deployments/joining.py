"""Work that several ask for at the same time, done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True, eq=False)
class _Work(Generic[Value]):
    task: asyncio.Task[Value]
    num_askers: int = 0


class InFlight(Generic[Key, Value]):
    """Does the work of a key once for all who ask while it is under way; they share its end, errors too.

    Who is cancelled leaves the others alone. Work that nobody waits for any more is cancelled.
    """

    def __init__(self) -> None:
        self._work: dict[Key, _Work[Value]] = {}

    def __len__(self) -> int:
        return len(self._work)

    async def run(self, key: Key, start: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """What `start()` returns, or what the one that is under way for `key` does. Raises what it raises."""
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = _Work(asyncio.create_task(start()))
        work.num_askers += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.num_askers -= 1
            if work.task.done() or not work.num_askers:
                work.task.cancel()
                if self._work.get(key) is work:  # whoever asks from now on starts anew
                    del self._work[key]
