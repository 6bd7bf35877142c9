"""Requests that wait for room, first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from epd.cache.errors import PoolBusy

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Turn(Generic[T]):
    """One waiting request."""

    attempt: Callable[[], T | None]
    future: asyncio.Future[T]


class PressureQueue(Generic[T]):
    """Lets a request take all it needs in one step when its turn has come and there is room for it.

    A request that waits holds nothing, so two of them can never wait for each other. One that cannot be
    served yet holds up those behind it: a large request is not starved by small ones.
    """

    def __init__(self, undo: Callable[[T], None], *, timeout_s: float) -> None:
        """`undo` gives back what an attempt took when the request was gone by then."""
        self._undo = undo
        self._timeout_s = timeout_s
        self._turns: deque[Turn[T]] = deque()
        self._is_woken = False

    def __len__(self) -> int:
        return len(self._turns)

    def try_now(self, attempt: Callable[[], T | None]) -> T | None:
        """What `attempt` took, or None when others wait or it found no room (it returned None)."""
        return attempt() if not self._turns else None

    async def wait(self, attempt: Callable[[], T | None]) -> T:
        """What `attempt` took when its turn came. Raises PoolBusy after `timeout_s`."""
        turn = Turn(attempt, asyncio.get_running_loop().create_future())
        self._turns.append(turn)
        try:
            async with asyncio.timeout(self._timeout_s):
                taken: T = await turn.future
                return taken
        except BaseException as error:
            if turn.future.done() and not turn.future.cancelled() and not turn.future.exception():
                self._undo(turn.future.result())
            elif turn in self._turns:
                self._turns.remove(turn)
                self.wake()
            if isinstance(error, TimeoutError):
                raise PoolBusy(f"no room in the embedding cache within {self._timeout_s} s") from error
            raise

    def wake(self) -> None:
        """To be called whenever room may have appeared: has those whose turn has come served, soon."""
        if self._turns and not self._is_woken:
            self._is_woken = True
            self._turns[0].future.get_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._is_woken = False
        while self._turns:
            turn = self._turns[0]
            if not turn.future.done():
                taken = turn.attempt()
                if taken is None:
                    return
                turn.future.set_result(taken)
            self._turns.popleft()

    def fail_all(self, error: Exception) -> None:
        """Ends every wait with `error`."""
        turns, self._turns = self._turns, deque()
        for turn in turns:
            if not turn.future.done():
                turn.future.set_exception(error)
