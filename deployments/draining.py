"""Requests in progress, counted, so that a service that is to end can let them end first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from epd.deployments.errors import StageUnavailable


class InProgress:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._count = 0
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request, from its start to its end. Raises StageUnavailable once `drain` was called."""
        if self._is_closed:
            raise StageUnavailable("the service is ending")
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def drain(self) -> None:
        """Takes no more, and waits for the end of those that have begun."""
        self._is_closed = True
        await self._idle.wait()
