"""Headers: what they hold, and that nothing else is taken for one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import msgpack
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epd.cache.entry import HEADER_BYTES, EntryHeader, MalformedHeader, rows_checksum, verify
from epd.cache.types import MediaGrid, MediaKey, RowLayout, Wanted

LAYOUT = RowLayout(8, torch.bfloat16)
WANTED = Wanted(MediaKey("n", "d"), MediaGrid(1, 4, 6), 6)
HEADER = EntryHeader.of(WANTED, LAYOUT, 1234)


def test_a_header_comes_back_from_its_bytes() -> None:
    """It has its fixed size and all its fields."""
    data = HEADER.encode()
    assert len(data) == HEADER_BYTES
    assert EntryHeader.decode(data) == HEADER
    assert HEADER.mismatch(WANTED, LAYOUT) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("key", "n/e"),
        ("num_tokens", 7),
        ("row_dim", 4),
        ("dtype", "float16"),
        ("grid", (1, 6, 4)),
    ],
)
def test_a_field_of_another_entry_is_a_mismatch(field: str, value: object) -> None:
    """Each field that a reader knows is compared."""
    assert replace(HEADER, **{field: value}).mismatch(WANTED, LAYOUT) == field  # type: ignore[arg-type]


@given(st.binary(max_size=HEADER_BYTES - 6))
def test_bytes_that_are_no_header_are_refused(body: bytes) -> None:
    """Whatever is behind a good magic number and length, decoding it is a header or MalformedHeader."""
    data = (b"EPDE" + len(body).to_bytes(2, "little") + body).ljust(HEADER_BYTES, b"\0")
    with suppress(MalformedHeader):
        EntryHeader.decode(data)


@pytest.mark.parametrize(
    "fields",
    [[], {"version": 1}, [1, "k", 1, 1, "f", [1, 1], 0], [1, b"k", 1, 1, "f", [1, 1, 1], 0], None],
    ids=str,
)
def test_msgpack_of_another_shape_is_refused(fields: object) -> None:
    """Well-formed msgpack with other fields is no header."""
    body = msgpack.packb(fields)
    data = (b"EPDE" + len(body).to_bytes(2, "little") + body).ljust(HEADER_BYTES, b"\0")
    with pytest.raises(MalformedHeader):
        EntryHeader.decode(data)


@pytest.mark.parametrize("data", [b"", bytes(HEADER_BYTES), HEADER.encode()[:-1], b"X" + HEADER.encode()[1:]])
def test_truncated_or_foreign_bytes_are_refused(data: bytes) -> None:
    """Length and magic number are checked first."""
    with pytest.raises(MalformedHeader):
        EntryHeader.decode(data)


def test_every_flipped_bit_of_a_header_is_caught_or_changes_nothing() -> None:
    """A reader either finds the header wrong or reads exactly what was written."""
    rows = torch.arange(48, dtype=torch.int16)
    buffers = [(rows.data_ptr(), rows.nbytes)]
    good = EntryHeader.of(WANTED, LAYOUT, rows_checksum(buffers)).encode()
    for bit in range(0, HEADER_BYTES * 8, 3):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        wrong = verify(bytes(flipped), buffers, WANTED, LAYOUT)
        assert wrong is not None or EntryHeader.decode(bytes(flipped)) == EntryHeader.decode(good)


def test_a_flipped_bit_of_the_rows_is_caught() -> None:
    """The checksum covers all buffers, in their order."""
    rows = torch.arange(48, dtype=torch.int16)
    halves = [(rows.data_ptr(), 48), (rows.data_ptr() + 48, 48)]
    header = EntryHeader.of(WANTED, LAYOUT, rows_checksum([(rows.data_ptr(), 96)])).encode()
    assert verify(header, halves, WANTED, LAYOUT) is None
    assert verify(header, halves[::-1], WANTED, LAYOUT) == "checksum"
    rows[40] ^= 1
    assert verify(header, halves, WANTED, LAYOUT) == "checksum"


def test_a_key_that_does_not_fit_is_refused() -> None:
    """Headers have one size; a longer key is the caller's mistake."""
    with pytest.raises(ValueError, match="does not fit"):
        replace(HEADER, key="n" * HEADER_BYTES).encode()
