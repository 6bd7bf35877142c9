"""What travels between the deployments: plain records of arrays, no tensors and no model types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One picture's place in a sequence: its key, its grid `(t, h, w)` and its placeholder tokens."""

    key: str
    grid: tuple[int, int, int]
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SequenceMessage:
    """One item, tokenised: `token_ids` int32 `[T]` with placeholders expanded, and its pictures in order."""

    token_ids: npt.NDArray[np.int32]
    media: tuple[MediaRef, ...] = ()
    salt: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class MediaMessage:
    """One picture to encode: encoded bytes as the client sent them.

    direct: its rows must travel with the answer, because what was published could not be read.
    pixel_bounds: least and most pixels of the resized picture, where the request has its own.
    """

    key: str
    grid: tuple[int, int, int]
    data: bytes
    direct: bool = False
    pixel_bounds: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class RowsMessage:
    """A picture's rows `[num_tokens, row_dim]`, sent directly because no store holds them.

    bfloat16, which numpy has not, travels as uint16 (`epd.cache.rows`).
    """

    grid: tuple[int, int, int]
    rows: npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class EncodeReply:
    """What became of each picture asked for, by key.

    A key is published (in the store), or direct (the store could not take it: its rows travel here),
    or failed (a message for the caller of this picture). timings: seconds of the call's steps.
    """

    published: tuple[str, ...] = ()
    direct: dict[str, RowsMessage] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbedReply:
    """Vectors of the sequences that could be computed, and what the others lack.

    vectors: float32 `[len(done), hidden]`, normalised over the requested dimensions. done: indices into the
    call's sequences. missing: keys found neither in the replica's pool nor in the store. failed: index to
    a message for the caller. timings: seconds of the call's steps.
    """

    vectors: npt.NDArray[np.float32]
    done: tuple[int, ...]
    missing: tuple[str, ...] = ()
    failed: dict[int, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
