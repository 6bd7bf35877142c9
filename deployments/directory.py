"""What Ingress knows of the store's content: which pictures it need not ask the encoders for."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

logger = logging.getLogger(__name__)


class Existence(Protocol):
    """The part of a store that is asked."""

    def exists(self, keys: Sequence[str]) -> list[bool]: ...

    def close(self) -> None: ...


class StoreDirectory:
    """Tells which keys are surely not in the store, so that their pictures are encoded before the embedder
    is asked, which saves a round.

    A key that was seen in an answered request counts as stored until `forget` says otherwise: the embedder
    looks, and may have it in its pool. So a wrong memory costs a round, never an answer.
    store: asked for keys never seen, on a thread, for at most `timeout_s`; when it does not answer
    the keys count as stored. max_known: keys remembered, the least recently used first to go.
    """

    def __init__(self, store: Existence, *, timeout_s: float, max_known: int = 100_000) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._max_known = max_known
        self._known: OrderedDict[str, None] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="directory")
        self._asking = 0

    async def absent(self, keys: Collection[str]) -> list[str]:
        """Those of `keys` that the store says it does not have."""
        unseen = [key for key in keys if not self._is_known(key)]
        if not unseen or self._asking > 8:  # a store that hangs must not gather a queue behind it
            return []
        self._asking += 1
        job = asyncio.get_running_loop().run_in_executor(self._thread, self._store.exists, unseen)
        job.add_done_callback(self._answered)
        done, _ = await asyncio.wait([job], timeout=self._timeout_s)
        if not done or job.exception() is not None:
            return []
        return [key for key, there in zip(unseen, job.result(), strict=True) if not there]

    def remember(self, keys: Iterable[str]) -> None:
        """These were published, or found."""
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._max_known:
            self._known.popitem(last=False)

    def forget(self, keys: Iterable[str]) -> None:
        """An embedder found these neither in its pool nor in the store."""
        for key in keys:
            self._known.pop(key, None)

    @property
    def num_known(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Waits for a call that is under way."""
        self._thread.shutdown(wait=True)
        self._store.close()

    def _is_known(self, key: str) -> bool:
        if key not in self._known:
            return False
        self._known.move_to_end(key)
        return True

    def _answered(self, job: asyncio.Future[list[bool]]) -> None:
        self._asking -= 1
        if not job.cancelled() and (error := job.exception()) is not None:
            logger.warning("the store was not asked what it has: %s", error)
