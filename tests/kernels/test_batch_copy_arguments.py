"""What the C extension's functions refuse."""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.kernels.copying import STREAM
from tests.kernels.fake_driver import (
    ILLEGAL_ADDRESS,
    FakeDriver,
)


@pytest.mark.parametrize("arguments", [(1,), ("a", "b"), ("a\0b",)])
def test_load_refuses_other_arguments(extension: ModuleType, arguments: tuple[object, ...]) -> None:
    """load() takes one path at most."""
    with pytest.raises((TypeError, ValueError)):
        extension.load(*arguments)


def test_library_path_may_be_a_path_object(extension: ModuleType, fake: FakeDriver) -> None:
    """load() takes what os.fspath takes."""
    assert extension.load(fake.library).path == "batch"


def test_no_ranges_no_call(fake: FakeDriver) -> None:
    """An empty table is not submitted."""
    driver = fake.load()
    fake.forget()
    driver.copy(EMPTY, EMPTY, 0, 0, 1, STREAM, 0, True, False)
    assert fake.all_calls == []


EMPTY = np.empty((3, 0), dtype=np.int64)
ONE = np.zeros((3, 1), dtype=np.int64)
GOOD = {
    "rows": ONE,
    "addresses": ONE.copy(),
    "src": 0,
    "dst": 0,
    "row_bytes": 1,
    "stream": STREAM,
    "device": 0,
    "batch": True,
    "any_order": False,
}


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"rows": None}, TypeError),
        ({"addresses": None}, TypeError),
        ({"addresses": bytes(24)}, BufferError),
        ({"addresses": np.zeros((3, 2), dtype=np.int64)}, ValueError),
        ({"rows": np.zeros(4, dtype=np.int64), "addresses": np.zeros(4, dtype=np.int64)}, ValueError),
        ({"rows": np.zeros(25, dtype=np.int8)[1:]}, ValueError),
        ({"addresses": np.zeros(25, dtype=np.int8)[1:]}, ValueError),
        ({"rows": np.zeros((2, 3), dtype=np.int64).T}, (ValueError, BufferError)),
        ({"src": "0"}, TypeError),
        ({"dst": -1}, OverflowError),
        ({"row_bytes": 1 << 64}, OverflowError),
        ({"stream": "stream"}, TypeError),
        ({"device": -1}, ValueError),
        ({"device": 64}, ValueError),
        ({"device": 1 << 70}, OverflowError),
        ({"batch": np.zeros(2)}, ValueError),
        ({"any_order": np.zeros(2)}, ValueError),
    ],
)
def test_copy_refuses_other_arguments(
    fake: FakeDriver, wrong: dict[str, object], error: type[Exception]
) -> None:
    """Wrong arguments raise before anything is submitted."""
    driver: Any = fake.load()
    fake.forget()
    with pytest.raises(error):
        driver.copy(*(GOOD | wrong).values())
    assert fake.all_calls == []


@pytest.mark.parametrize("problem", [None, "driver error", "one byte short"])
def test_copy_lets_go_of_both_tables(fake: FakeDriver, problem: str | None) -> None:
    """However a call ends, it holds neither table: an array whose buffer is held refuses to grow."""
    driver: Any = fake.load()
    fake.knobs.batch_result = ILLEGAL_ADDRESS if problem == "driver error" else 0
    data = bytearray(8)
    rows = bytearray(array("q", [0, 4, 4]).tobytes())
    addresses = bytearray(23 if problem == "one byte short" else 24)
    address = np.frombuffer(data, dtype=np.int8).ctypes.data
    with nullcontext() if problem is None else pytest.raises((RuntimeError, ValueError)):
        driver.copy(rows, addresses, address, address, 1, STREAM, 0, True, False)
    rows.append(0)
    addresses.append(0)


def test_copy_takes_all_its_arguments(fake: FakeDriver) -> None:
    """Fewer arguments are a TypeError."""
    driver: Any = fake.load()
    with pytest.raises(TypeError, match="takes 9 arguments, got 2"):
        driver.copy(ONE, ONE)


@pytest.mark.parametrize("device", [-1, 64, "0"])
def test_supports_refuses_other_devices(fake: FakeDriver, device: object) -> None:
    """supports() takes an ordinal."""
    with pytest.raises((TypeError, ValueError)):
        fake.load().supports(device)  # type: ignore[arg-type]


def test_driver_type_cannot_be_called(fake: FakeDriver) -> None:
    """A Driver comes from load() alone."""
    with pytest.raises(TypeError):
        type(fake.load())()
