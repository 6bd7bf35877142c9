"""The vocabulary of the embedding cache: types that cross from one room to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MediaGrid:
    """Patches of one picture as `(t, h, w)`, before the spatial merge.

    Known from the picture's header alone.
    """

    t: int
    h: int
    w: int

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    def num_tokens(self, merge_size: int) -> int:
        """Rows that the encoder makes of it: `t * h * w / merge_size**2`."""
        return self.num_patches // merge_size**2


@dataclass(frozen=True, slots=True)
class MediaKey:
    """Name of one picture's rows: `{namespace}/{digest}`.

    `namespace` fingerprints everything but the picture that decides the rows (weights, dtype,
    preprocessing, format version); `digest` is a 256-bit hash in hex of the bytes as received.
    """

    namespace: str
    digest: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.digest}"

    @classmethod
    def parse(cls, text: str) -> MediaKey:
        """Inverse of `str(key)`. Raises ValueError when `text` is not of that form."""
        namespace, slash, digest = text.rpartition("/")
        if not (namespace and slash and digest):
            raise ValueError(f"not a media key: {text!r}")
        return cls(namespace, digest)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Shape of an embedding row: `row_dim = out_hidden * (1 + num_deepstack)` values of `dtype`."""

    row_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        return self.row_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageRun:
    """Neighbouring pages `start .. start + length - 1` of a pool."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Rows that a request needs: those of `key`, for a picture of `grid` patches and `num_tokens` rows."""

    key: MediaKey
    grid: MediaGrid
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"an entry needs at least one row, {self.key} was given {self.num_tokens}")
