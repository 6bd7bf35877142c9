"""Three ranges in host memory for the C extension to copy. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from epd.kernels.batch_copy import Driver
from epd.kernels.transfer_plan import TransferPlan

STREAM = 0x7000
"""A stream handle that is no default stream's."""

Rows = npt.NDArray[np.int32]


class Copying:
    """Two row tables in host memory, and the address table of three ranges between them."""

    SRC_STARTS = (1, 11, 23)
    DST_STARTS = (2, 6, 10)
    LENGTHS = (4, 4, 2)

    def __init__(self) -> None:
        self.src: Rows = np.arange(28 * 5, dtype=np.int32).reshape(28, 5)
        self.dst: Rows = np.full((16, 5), -1, dtype=np.int32)
        self.plan = TransferPlan(self.SRC_STARTS, self.DST_STARTS, self.LENGTHS)
        self.table = np.array(
            [
                [self.dst.ctypes.data + d * 20 for d in self.DST_STARTS],
                [self.src.ctypes.data + s * 20 for s in self.SRC_STARTS],
                [n * 20 for n in self.LENGTHS],
            ],
            dtype=np.int64,
        )

    def submit(
        self,
        driver: Driver,
        *,
        stream: int = STREAM,
        device: int = 0,
        batch: bool = True,
        any_order: bool = False,
    ) -> str:
        """Copies through `driver`, rows of one byte counted from address 0."""
        scratch = np.empty_like(self.table)
        return driver.copy(self.table, scratch, 0, 0, 1, stream, device, batch, any_order)

    @property
    def expected(self) -> Rows:
        rows = np.full((16, 5), -1, dtype=np.int32)
        for s, d, n in zip(self.SRC_STARTS, self.DST_STARTS, self.LENGTHS, strict=True):
            rows[d : d + n] = self.src[s : s + n]
        return rows


T = TypeVar("T")


def in_own_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a new thread, which has no CUDA context yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
