"""Plans submitted through the real C extension."""

from __future__ import annotations

import threading

import numpy as np

from epd.kernels.transfer_plan import TransferPlan
from tests.kernels.copying import STREAM, Copying
from tests.kernels.fake_driver import (
    FakeDriver,
)


def test_plan_submits_its_ranges(fake: FakeDriver, copying: Copying) -> None:
    """TransferPlan turns rows into addresses of whichever tables it is given, and is reused."""
    driver = fake.load()
    for _ in range(2):
        dst = np.full((16, 5), -1, dtype=np.int32)
        path = copying.plan.submit(driver, copying.src.ctypes.data, dst.ctypes.data, 20, STREAM, 0)
        assert path == "batch"
        np.testing.assert_array_equal(dst, copying.expected)


def test_plan_takes_other_row_widths(fake: FakeDriver) -> None:
    """One plan serves tables of another row width."""
    driver = fake.load()
    plan = TransferPlan([1], [0], [2])
    for width in (3, 8):
        src = np.arange(4 * width, dtype=np.int8).reshape(4, width)
        dst = np.zeros((4, width), dtype=np.int8)
        plan.submit(driver, src.ctypes.data, dst.ctypes.data, width, STREAM, 0)
        np.testing.assert_array_equal(dst[:2], src[1:3])


def test_empty_plan_submits_nothing(fake: FakeDriver) -> None:
    """No range, or rows without bytes: the driver is not called."""
    driver = fake.load()
    fake.forget()
    TransferPlan([], [], []).submit(driver, 8, 8, 4, STREAM, 0)
    TransferPlan([0], [0], [1]).submit(driver, 8, 8, 0, STREAM, 0)
    assert fake.all_calls == []


def test_plan_is_shared_by_threads(fake: FakeDriver) -> None:
    """A second thread does not change the addresses of a driver call that is under way."""
    driver = fake.load()
    plan = TransferPlan([0, 4], [5, 2], [2, 3])
    src = np.arange(32, dtype=np.int32).reshape(8, 4)
    tables = [np.full((8, 4), -1, dtype=np.int32) for _ in range(2)]
    fake.knobs.hold = 1
    threads = [
        threading.Thread(target=plan.submit, args=(driver, src.ctypes.data, dst.ctypes.data, 16, STREAM, 0))
        for dst in tables
    ]
    threads[0].start()
    assert fake.wait_until_held()
    threads[1].start()
    threads[1].join(0.05)  # time in which a plan without a lock would go wrong
    fake.release()
    for thread in threads:
        thread.join()
    for dst in tables:
        np.testing.assert_array_equal(dst[2:7], src[[4, 5, 6, 0, 1]])
