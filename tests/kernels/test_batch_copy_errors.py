"""The real C extension against the fake driver library: driver errors and contexts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.copying import Copying, in_own_thread
from tests.kernels.fake_driver import (
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_SUPPORTED,
    FakeDriver,
)


def test_batch_error_is_named_after_waiting(fake: FakeDriver, copying: Copying) -> None:
    """A failing batch raises with the error's name and the range, once earlier ranges have landed."""
    fake.knobs.deferred = 1
    fake.knobs.batch_result = ILLEGAL_ADDRESS
    fake.knobs.fail_index = 2
    driver = fake.load()
    fake.forget()
    with pytest.raises(
        RuntimeError, match=r"^cuMemcpyBatchAsync: CUDA_ERROR_ILLEGAL_ADDRESS \(700\) at range 2 of 3$"
    ):
        copying.submit(driver)
    assert fake.calls == ["cuMemcpyBatchAsync", "cuStreamSynchronize"]
    np.testing.assert_array_equal(copying.dst[2:10], copying.expected[2:10])


def test_batch_error_of_no_range(fake: FakeDriver, copying: Copying) -> None:
    """A failure that no single range caused names none."""
    fake.knobs.batch_result = INVALID_VALUE
    with pytest.raises(RuntimeError, match=r"^cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE \(1\)$"):
        copying.submit(fake.load())


def test_range_error_is_named_after_waiting(fake: FakeDriver, copying: Copying) -> None:
    """A failing cuMemcpyAsync stops the rest and raises once earlier ranges have landed."""
    fake.knobs.deferred = 1
    fake.knobs.copy_result = ILLEGAL_ADDRESS
    fake.knobs.fail_index = 1
    driver = fake.load()
    fake.forget()
    with pytest.raises(
        RuntimeError, match=r"^cuMemcpyAsync: CUDA_ERROR_ILLEGAL_ADDRESS \(700\) at range 1 of 3$"
    ):
        copying.submit(driver, batch=False)
    assert fake.calls == ["cuMemcpyAsync"] * 2 + ["cuStreamSynchronize"]
    np.testing.assert_array_equal(copying.dst[2:6], copying.expected[2:6])


def test_not_supported_by_cumemcpyasync_raises(fake: FakeDriver, copying: Copying) -> None:
    """Only the batch call may answer NOT_SUPPORTED without an exception."""
    fake.knobs.copy_result = NOT_SUPPORTED
    fake.knobs.fail_index = 0
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_SUPPORTED"):
        copying.submit(fake.load(), batch=False)


def test_failed_wait_is_told_too(fake: FakeDriver, copying: Copying) -> None:
    """When waiting fails as well, both errors are in the message."""
    fake.knobs.batch_result = ILLEGAL_ADDRESS
    fake.knobs.synchronize_result = ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match=r"; waiting for the stream: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)$"):
        copying.submit(fake.load())


def test_error_without_a_name(fake: FakeDriver, copying: Copying) -> None:
    """An error that the driver cannot name is given by number."""
    fake.knobs.batch_result = 9999
    with pytest.raises(RuntimeError, match=r"unknown CUresult \(9999\)"):
        copying.submit(fake.load())


def test_an_error_is_not_remembered(fake: FakeDriver, copying: Copying) -> None:
    """After any other error the next call tries the batch again."""
    driver = fake.load()
    fake.knobs.batch_result = INVALID_VALUE
    with pytest.raises(RuntimeError):
        copying.submit(driver)
    fake.knobs.batch_result = 0
    assert copying.submit(driver) == "batch"


def test_thread_without_a_context_gets_the_primary_one(fake: FakeDriver, copying: Copying) -> None:
    """A thread that never used CUDA is bound once; the primary context is retained once per device."""
    driver = fake.load()
    for _ in range(2):
        in_own_thread(lambda: [copying.submit(driver) for _ in range(2)])
    bindings = [call for call in fake.all_calls if call.startswith(("cuCtx", "cuDevice"))]
    assert bindings == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxSetCurrent"]


def test_context_that_cannot_be_had(fake: FakeDriver, copying: Copying) -> None:
    """Without a context nothing is submitted, and the next call tries again."""
    fake.knobs.context_result = INVALID_CONTEXT
    driver = fake.load()
    fake.forget()
    with pytest.raises(RuntimeError, match=r"^cuDevicePrimaryCtxRetain: CUDA_ERROR_INVALID_CONTEXT \(201\)$"):
        in_own_thread(lambda: copying.submit(driver))
    assert fake.calls == []
    fake.knobs.context_result = 0
    assert in_own_thread(lambda: copying.submit(driver)) == "batch"


def test_device_that_is_not_there(fake: FakeDriver, copying: Copying) -> None:
    """An ordinal that the driver does not know raises before anything is submitted."""
    driver = fake.load()
    with pytest.raises(RuntimeError, match=r"^cuDeviceGet: "):
        in_own_thread(lambda: copying.submit(driver, device=63))
