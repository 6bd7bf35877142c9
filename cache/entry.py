"""The stored object: a header of fixed size, then the rows. Written by one process, trusted by none.

Header: 4 bytes magic, 2 bytes length (little-endian), that many bytes of msgpack, zeros up to
`HEADER_BYTES`. Everything in it but the checksum is known to a reader before the read, and compared.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from ctypes import c_char
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from xxhash import xxh3_64

from epd.cache.types import MediaGrid, RowLayout, Wanted

HEADER_BYTES = 512
HEADER_VERSION = 1

Buffer = tuple[int, int]
"""Memory of this process as `(pointer, size in bytes)`."""

_MAGIC = b"EPDE"
_PREFIX = struct.Struct("<4sH")
_FIELDS = ("version", "key", "num_tokens", "row_dim", "dtype", "grid", "checksum")


class MalformedHeader(ValueError):
    """The bytes are no header."""


@dataclass(frozen=True, slots=True)
class EntryHeader:
    """What a stored object says of itself. `checksum`: XXH3 of its rows."""

    version: int
    key: str
    num_tokens: int
    row_dim: int
    dtype: str
    grid: tuple[int, int, int]
    checksum: int

    @classmethod
    def of(cls, wanted: Wanted, layout: RowLayout, checksum: int) -> EntryHeader:
        """The header of `wanted`'s rows."""
        return cls(
            HEADER_VERSION,
            str(wanted.key),
            wanted.num_tokens,
            layout.row_dim,
            dtype_name(layout.dtype),
            _sides(wanted.grid),
            checksum,
        )

    def encode(self) -> bytes:
        """`HEADER_BYTES` bytes. Raises ValueError when the key is too long to fit."""
        body: bytes = msgpack.packb([getattr(self, name) for name in _FIELDS])
        if _PREFIX.size + len(body) > HEADER_BYTES:
            raise ValueError(f"key of {len(self.key)} characters does not fit a header: {self.key[:80]}...")
        return (_PREFIX.pack(_MAGIC, len(body)) + body).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> EntryHeader:
        """Inverse of `encode`. Raises MalformedHeader for any other bytes."""
        if len(data) != HEADER_BYTES:
            raise MalformedHeader(f"{len(data)} bytes, a header has {HEADER_BYTES}")
        magic, length = _PREFIX.unpack_from(data)
        body = data[_PREFIX.size : _PREFIX.size + length]
        if magic != _MAGIC or len(body) != length:
            raise MalformedHeader("no magic number or a wrong length")
        try:
            fields = msgpack.unpackb(body)
        except (ValueError, msgpack.UnpackException) as error:
            raise MalformedHeader("not msgpack") from error
        return cls(*_checked(fields))

    def mismatch(self, wanted: Wanted, layout: RowLayout) -> str | None:
        """The first field in which this is not the header of `wanted`'s rows, or None."""
        expected = EntryHeader.of(wanted, layout, self.checksum)
        for name in _FIELDS:
            if getattr(self, name) != getattr(expected, name):
                return name
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """As headers spell it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def rows_checksum(buffers: Sequence[Buffer]) -> int:
    """XXH3 (64 bits) of the buffers' bytes, in order. About as fast as memory is read."""
    hasher = xxh3_64()
    for pointer, size in buffers:
        hasher.update((c_char * size).from_address(pointer))
    return hasher.intdigest()


def verify(header: bytes, rows: Sequence[Buffer], wanted: Wanted, layout: RowLayout) -> str | None:
    """What is wrong with an object that was read as `wanted`'s: a field's name, `header`, or None.

    The header's own key is compared too, so that an object stored under another's name is caught.
    """
    try:
        decoded = EntryHeader.decode(header)
    except MalformedHeader:
        return "header"
    wrong = decoded.mismatch(wanted, layout)
    if wrong is None and rows_checksum(rows) != decoded.checksum:
        return "checksum"
    return wrong


def _sides(grid: MediaGrid) -> tuple[int, int, int]:
    return (grid.t, grid.h, grid.w)


def _checked(fields: Any) -> list[Any]:
    """The fields in their types. Raises MalformedHeader when they are not of them."""
    match fields:
        case [int(), str(), int(), int(), str(), [int(), int(), int()] as grid, int()]:
            return [*fields[:5], tuple(grid), fields[6]]
    raise MalformedHeader("fields of other types")
