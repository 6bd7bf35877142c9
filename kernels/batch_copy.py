"""The CUDA driver's batched copy, through the optional C extension, and what is known of it.

The extension links nothing of CUDA. It opens the driver library at run time and asks the driver's
own `cuGetProcAddress` for `cuMemcpyBatchAsync` as of CUDA 12.8.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

CopyPath = Literal["batch", "ranges", "none"]
"""`batch`: one cuMemcpyBatchAsync; `ranges`: one cuMemcpyAsync per range; `none`: no native copies."""

Table = npt.NDArray[np.int64]

DRIVER_LIBRARY = "libcuda.so.1"


class Driver(Protocol):
    """A loaded driver library, as the extension's `Driver` type shows it."""

    @property
    def path(self) -> CopyPath:
        """What it can do on a device that supports it."""

    @property
    def reason(self) -> str | None:
        """Why `path` is not `batch`."""

    @property
    def version(self) -> int:
        """`1000 * major + 10 * minor`, or 0 when unknown."""

    def supports(self, device: int) -> bool:
        """False once `device` answered that batches are not supported; it is not asked again."""

    def copy(
        self,
        rows: Table,
        addresses: Table,
        src: int,
        dst: int,
        row_bytes: int,
        stream: int,
        device: int,
        batch: bool,
        any_order: bool,
        /,
    ) -> CopyPath:
        """Submits `rows` `[3, n]`: destination rows, source rows, numbers of rows.

        `addresses` is room for the same in bytes; `src` and `dst` are where row 0 lies. Releases the GIL.
        Raises RuntimeError with the driver's error name, after waiting for the stream.
        """


@dataclass(frozen=True, slots=True)
class BatchCopyStatus:
    """Which way a copy between pinned host memory and one device goes, and why not in one batch."""

    path: Literal["batch", "ranges", "copy_"]
    reason: str | None
    driver_version: int


@dataclass(frozen=True, slots=True)
class _NoDriver:
    """Stands in where the extension was not built."""

    reason: str
    path: CopyPath = "none"
    version: int = 0

    def supports(self, device: int) -> bool:
        return False

    def copy(
        self,
        rows: Table,
        addresses: Table,
        src: int,
        dst: int,
        row_bytes: int,
        stream: int,
        device: int,
        batch: bool,
        any_order: bool,
        /,
    ) -> CopyPath:
        raise AssertionError("no driver to copy with")


def load_driver(library: str = DRIVER_LIBRARY, extension: str = "epd.kernels._batch_copy") -> Driver:
    """Opens `library` anew. Never raises for a missing extension, library or symbol: see `reason`."""
    try:
        module = importlib.import_module(extension)
    except ImportError as error:
        return _NoDriver(f"the C extension is not there: {error}")
    return cast(Driver, module.load(library))


@cache
def default_driver() -> Driver:
    """The process's driver, opened at first use."""
    return load_driver()


def describe(driver: Driver, device: int) -> BatchCopyStatus:
    """How `driver` copies between pinned host memory and `device`."""
    if driver.path == "none":
        return BatchCopyStatus("copy_", driver.reason, driver.version)
    if driver.path == "ranges":
        return BatchCopyStatus("ranges", driver.reason, driver.version)
    if not driver.supports(device):
        reason = f"batched copies not supported on device {device}"
        return BatchCopyStatus("ranges", reason, driver.version)
    return BatchCopyStatus("batch", None, driver.version)


def status_of_build(
    hip: str | None, device: int, open_driver: Callable[[], Driver] = default_driver
) -> BatchCopyStatus:
    """`describe` of the driver that `open_driver` opens, except on a ROCm build of torch, of version `hip`.

    Torch calls a ROCm build's devices cuda, and there is no CUDA driver to open.
    """
    if hip is not None:
        return BatchCopyStatus("copy_", f"ROCm build of torch ({hip}): no CUDA driver", 0)
    return describe(open_driver(), device)
