"""Which piece of which sequence runs next, when sequences hold pages of the KV pool from the start."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from epd.cache.kv.leases import KVPages, Lease
from epd.models.pieces import Piece, PrefillSequence


class Progress:
    """A sequence that holds a lease: the keys and values of its first `done` tokens are in the pool.

    `piece`: the tokens that it runs in the current step.
    """

    def __init__(self, index: int, lease: Lease, hashes: list[bytes]) -> None:
        self.index = index
        self.lease = lease
        self.hashes = hashes
        self.done = lease.cached_tokens
        self.piece = Piece(index, self.done, self.done)

    @property
    def remaining(self) -> int:
        return len(self.lease.slots) - self.done

    @property
    def is_partial(self) -> bool:
        """Whether its piece begins or ends inside what this sequence has to run."""
        return self.piece.start > self.lease.cached_tokens or self.piece.end < len(self.lease.slots)

    def take(self, room: int, max_tokens: int) -> int:
        """Set the piece, of at most `room` tokens; 0 when a sequence that need not be cut does not fit.

        A sequence that no step of `max_tokens` could hold is cut wherever the room ends.
        """
        must_be_cut = len(self.lease.slots) - self.lease.cached_tokens > max_tokens
        size = min(self.remaining, room) if must_be_cut or self.remaining <= room else 0
        self.piece = Piece(self.index, self.done, self.done + size)
        return size


class PieceSchedule:
    """Steps of at most `max_tokens` new tokens. Only a sequence with more than that to run is cut.

    keep: leave finished sequences' pages to the prefix cache. reuse: begin with what it has.
    Call `close` at the end, also after a failure: it gives back what is still leased.
    """

    def __init__(
        self,
        pages: KVPages,
        sequences: Mapping[int, PrefillSequence],
        max_tokens: int,
        *,
        keep: bool,
        reuse: bool,
    ) -> None:
        self._pages = pages
        self._sequences = sequences
        self._max_tokens = max_tokens
        self._keep = keep
        self._reuse = reuse
        self._waiting = deque(sequences)
        self._active: list[Progress] = []
        self._step: list[Progress] = []
        self.hit_tokens = 0

    def next_step(self) -> list[Progress]:
        """The sequences whose next pieces run together; empty when all are done."""
        assert not self._step, "the last step is not finished"
        room = self._max_tokens
        for progress in self._active:
            room -= self._take(progress, room)
        while room and (admitted := self._admit()) is not None:
            size = self._take(admitted, room)
            if not size:
                break
            room -= size
        assert self._step or not self._waiting, "a sequence alone always fits"
        return self._step

    def finish_step(self) -> None:
        """The pieces of the last step ran: their keys and values are in the pool."""
        for progress in self._step:
            progress.done = progress.piece.end
            if progress.done == len(progress.lease.slots):
                self._active.remove(progress)
                self._pages.end(progress.lease, progress.hashes if self._keep else ())
        self._step = []

    def close(self) -> None:
        """Give back the leases of unfinished sequences; nothing of them is kept."""
        for progress in self._active:
            self._pages.end(progress.lease)
        self._active = []

    def _take(self, progress: Progress, room: int) -> int:
        size = progress.take(room, self._max_tokens)
        if size:
            self._step.append(progress)
        return size

    def _admit(self) -> Progress | None:
        """Lease pages for the next waiting sequence; None when there is none, or no room for it yet."""
        if not self._waiting:
            return None
        sequence = self._sequences[self._waiting[0]]
        hashes = sequence.page_hashes(self._pages.page_size) if self._keep else []
        lease = self._pages.lease(sequence.num_tokens, hashes if self._reuse else ())
        if lease is None:
            return None
        progress = Progress(self._waiting.popleft(), lease, hashes)
        self._active.append(progress)
        self.hit_tokens += lease.cached_tokens
        return progress
