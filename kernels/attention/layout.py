"""Where the sequences of a packed batch lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch


class SequenceLayout:
    """Sequences laid end to end: lengths, their cumulative sum, and groups of equal length.

    Built once per forward, so that no layer copies from the device to the host.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if any(n <= 0 for n in lengths):
            raise ValueError(f"sequence lengths must be positive, got {list(lengths)}")
        self.lengths = tuple(lengths)
        self.device = torch.device(device)
        self.offsets = (0, *accumulate(self.lengths))

    @property
    def num_tokens(self) -> int:
        return self.offsets[-1]

    @cached_property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 `[B + 1]` on the device."""
        return torch.tensor(self.offsets, dtype=torch.int32, device=self.device)

    def rows(self, members: Sequence[int]) -> Rows:
        """Packed rows of `members`, sequences of one length."""
        length = self.lengths[members[0]]
        starts = [self.offsets[i] for i in members]
        if all(b - a == length for a, b in pairwise(starts)):
            return Rows(len(members), length, starts[0], None)
        first = torch.tensor(starts, device=self.device)[:, None]
        index = (first + torch.arange(length, device=self.device)).flatten()
        return Rows(len(members), length, 0, index)


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` sequences of `length` tokens: neighbours from row `start` on, or the rows in `index`."""

    count: int
    length: int
    start: int
    index: torch.Tensor | None

    def take(self, packed: torch.Tensor) -> torch.Tensor:
        """`[T, ...]` -> `[count, length, ...]`; a view when the rows are neighbours."""
        if self.index is None:
            picked = packed[self.start : self.start + self.count * self.length]
        else:
            picked = packed.index_select(0, self.index)
        return picked.view(self.count, self.length, *packed.shape[1:])

    def put(self, packed: torch.Tensor, values: torch.Tensor) -> None:
        """Inverse of `take`: write `[count, length, ...]` to its rows of `packed`."""
        if self.index is None:
            own = packed[self.start : self.start + self.count * self.length]
            own.view(self.count, self.length, *packed.shape[1:]).copy_(values)
        else:
            packed.index_copy_(0, self.index, values.flatten(0, 1))


class Group:
    """Sequences that agree in their number of queries and of keys: one dense attention call.

    The queries are the last tokens of their keys: whatever comes before them is a cached prefix.
    """

    def __init__(self, queries: Rows, keys: Rows) -> None:
        self.queries = queries
        self.keys = keys
        self._masks: dict[tuple[bool, int | None], torch.Tensor] = {}

    def mask(self, causal: bool, window: int | None, device: torch.device) -> torch.Tensor | None:
        """bool `[queries, keys]`, True where a query may see a key; None when no mask is needed
        beyond `causal` itself on a square. Built once per forward, not per layer.
        """
        n, m = self.queries.length, self.keys.length
        narrow = window is not None and window < m
        if not narrow and (not causal or n == m or n == 1):
            return None
        if (causal, window) not in self._masks:
            place = torch.arange(m, device=device)
            gap = place[m - n :, None] - place
            seen = gap >= 0 if causal else torch.ones_like(gap, dtype=torch.bool)
            if window is not None:
                seen &= gap.abs() < window
            self._masks[causal, window] = seen
        return self._masks[causal, window]


class Plan:
    """Which keys each sequence's queries meet; built once per forward and shared by its layers."""

    def __init__(self, queries: SequenceLayout, keys: SequenceLayout) -> None:
        """Raises ValueError when the layouts do not hold the same number of sequences."""
        if len(queries.lengths) != len(keys.lengths):
            raise ValueError(f"{len(queries.lengths)} query sequences but {len(keys.lengths)} of keys")
        self.queries = queries
        self.keys = keys

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The sequences by (number of queries, number of keys), in order of first appearance."""
        members: dict[tuple[int, int], list[int]] = {}
        for i, pair in enumerate(zip(self.queries.lengths, self.keys.lengths, strict=True)):
            members.setdefault(pair, []).append(i)
        return tuple(Group(self.queries.rows(m), self.keys.rows(m)) for m in members.values())
