"""The fake driver library of fake_driver.c, its knobs and its records, seen from Python."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from epd.kernels.batch_copy import Driver

INVALID_VALUE = 1
INVALID_CONTEXT = 201
ILLEGAL_ADDRESS = 700
NOT_SUPPORTED = 801


class Knobs(ctypes.Structure):
    """What the library answers; see `fake_knobs_type`."""

    _fields_ = [
        ("version", ctypes.c_int),
        ("version_result", ctypes.c_int),
        ("lookup_result", ctypes.c_int),
        ("lookup_status", ctypes.c_int),
        ("context_result", ctypes.c_int),
        ("batch_result", ctypes.c_int),
        ("copy_result", ctypes.c_int),
        ("synchronize_result", ctypes.c_int),
        ("fail_index", ctypes.c_int64),
        ("devices_without_batches", ctypes.c_uint),
        ("deferred", ctypes.c_int),
        ("hold", ctypes.c_int),
        ("idle", ctypes.c_int),
    ]


class _Copy(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("dst", "src", "size", "stream")]


class _Batch(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("count", "num_attributes", "first_attribute", "source_order", "hints", "flags")
    ]


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """Arguments of the last batch call."""

    count: int
    num_attributes: int
    first_attribute: int
    source_order: int
    hints: int
    flags: int


class FakeDriver:
    """Knobs and records of one compiled library; `load` opens it through the extension under test."""

    def __init__(self, library: Path, extension: ModuleType) -> None:
        self.library = library
        self.extension = extension
        self._lib = ctypes.CDLL(str(library))
        self._lib.fake_reset()

    def load(self) -> Driver:
        return cast("Driver", self.extension.load(str(self.library)))

    @property
    def knobs(self) -> Knobs:
        return Knobs.in_dll(self._lib, "fake_knobs")

    @property
    def calls(self) -> list[str]:
        """Driver functions in the order called, context handling left out."""
        return [name for name in self.all_calls if not name.startswith(("cuCtx", "cuDevice"))]

    @property
    def all_calls(self) -> list[str]:
        count = ctypes.c_int.in_dll(self._lib, "fake_num_calls").value
        table = ((ctypes.c_char * 48) * 4096).in_dll(self._lib, "fake_calls")
        return [table[i].value.decode() for i in range(count)]

    @property
    def copies(self) -> list[tuple[int, int, int, int]]:
        """`(dst, src, size, stream)` in the order submitted."""
        count = ctypes.c_int.in_dll(self._lib, "fake_num_copies").value
        table = (_Copy * 4096).in_dll(self._lib, "fake_copies")
        return [(c.dst, c.src, c.size, c.stream) for c in table[:count]]

    @property
    def last_batch(self) -> BatchRecord:
        batch = _Batch.in_dll(self._lib, "fake_last_batch")
        return BatchRecord(*(getattr(batch, name) for name in BatchRecord.__slots__))

    def forget(self) -> None:
        """Empties the record of calls."""
        ctypes.c_int.in_dll(self._lib, "fake_num_calls").value = 0

    def wait_until_held(self) -> bool:
        """Blocks until a batch call is held. Needs the GIL to come back."""
        return bool(self._lib.fake_wait_until_held())

    def release(self) -> None:
        """Lets a held batch call go on."""
        self._lib.fake_release()

    def layout(self) -> list[int]:
        """Size and offsets of the attributes struct as the library was compiled."""
        values = (ctypes.c_uint64 * 6)()
        self._lib.fake_layout(values)
        return list(values)
