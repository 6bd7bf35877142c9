"""The real C extension against the fake driver library. Free of torch, so that it runs under sanitizers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from epd.kernels.batch_copy import BatchCopyStatus, Driver, default_driver, describe, load_driver
from epd.kernels.transfer_plan import TransferPlan
from tests.kernels.fake_driver import (
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_SUPPORTED,
    FakeDriver,
)
from tests.kernels.native_build import compile_fake_driver

STREAM = 0x7000
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


@pytest.fixture
def copying() -> Copying:
    return Copying()


def test_all_ranges_go_in_one_batch(fake: FakeDriver, copying: Copying) -> None:
    """A current driver gets one call with every range, and the rows arrive."""
    driver = fake.load()
    fake.forget()
    assert copying.submit(driver) == "batch"
    assert fake.calls == ["cuMemcpyBatchAsync"]
    assert fake.copies == [(*column, STREAM) for column in zip(*copying.table.tolist(), strict=True)]
    np.testing.assert_array_equal(copying.dst, copying.expected)


@pytest.mark.parametrize(("any_order", "source_order"), [(False, 1), (True, 3)])
def test_batch_attributes(fake: FakeDriver, copying: Copying, any_order: bool, source_order: int) -> None:
    """One attribute set from range 0 on: the source order asked for, no hints, no flags."""
    copying.submit(fake.load(), any_order=any_order)
    batch = fake.last_batch
    assert (batch.count, batch.num_attributes, batch.first_attribute) == (3, 1, 0)
    assert (batch.source_order, batch.hints, batch.flags) == (source_order, 0, 0)


def test_symbol_is_asked_for_as_of_12080(fake: FakeDriver) -> None:
    """The driver is asked for the 12.8 form by its own look-up, once, and for nothing else."""
    driver = fake.load()
    assert fake.calls == ["cuMemcpyBatchAsync@12080/1"]
    assert (driver.path, driver.reason, driver.version) == ("batch", None, 13000)


def test_first_driver_with_batches_is_not_too_old(fake: FakeDriver) -> None:
    """12.8 itself serves batches."""
    fake.knobs.version = 12080
    assert fake.load().path == "batch"


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"version": 12040}, "driver too old: CUDA 12.4, batched copies need 12.8"),
        ({"lookup_status": 1}, "symbol missing: cuMemcpyBatchAsync as of CUDA 12.8 (status 1)"),
        ({"lookup_status": 2}, "symbol missing: cuMemcpyBatchAsync as of CUDA 12.8 (status 2)"),
        ({"lookup_result": INVALID_VALUE}, "cuGetProcAddress: CUDA_ERROR_INVALID_VALUE (1)"),
    ],
)
def test_without_batches_each_range_is_one_call(
    fake: FakeDriver, copying: Copying, knobs: dict[str, int], reason: str
) -> None:
    """A driver without the call gets one cuMemcpyAsync per range, never another symbol, and says why."""
    for name, value in knobs.items():
        setattr(fake.knobs, name, value)
    driver = fake.load()
    fake.forget()
    assert describe(driver, 0) == BatchCopyStatus("ranges", reason, fake.knobs.version)
    assert not driver.supports(0)
    assert copying.submit(driver) == "ranges"
    assert fake.calls == ["cuMemcpyAsync"] * 3
    np.testing.assert_array_equal(copying.dst, copying.expected)


def test_driver_without_look_up(extension: ModuleType, build_folder: Path, copying: Copying) -> None:
    """A library without cuGetProcAddress_v2 keeps its plain symbol uncalled and copies range by range."""
    library = compile_fake_driver(build_folder / "libfake_no_lookup.so", "-DFAKE_WITHOUT_LOOKUP")
    fake = FakeDriver(library, extension)
    driver = fake.load()
    assert driver.path == "ranges"
    assert driver.reason == "symbol missing: cuGetProcAddress_v2"
    copying.submit(driver)
    assert fake.calls == ["cuMemcpyAsync"] * 3
    np.testing.assert_array_equal(copying.dst, copying.expected)


def test_library_without_copies(extension: ModuleType, build_folder: Path, copying: Copying) -> None:
    """A library that lacks a basic function is no driver: nothing is copied through it."""
    library = compile_fake_driver(build_folder / "libfake_no_copy.so", "-DFAKE_WITHOUT_COPY")
    driver = FakeDriver(library, extension).load()
    assert describe(driver, 0) == BatchCopyStatus("copy_", "symbol missing: cuMemcpyAsync", 0)
    with pytest.raises(RuntimeError, match="nothing to copy with: symbol missing: cuMemcpyAsync"):
        copying.submit(driver)


def test_driver_that_fails_at_once(fake: FakeDriver) -> None:
    """A library whose driver cannot even tell its version is no driver."""
    fake.knobs.version_result = 100
    driver = fake.load()
    assert (driver.path, driver.reason) == ("none", "cuDriverGetVersion: CUDA_ERROR_NO_DEVICE (100)")


def test_no_driver_library(extension: ModuleType, tmp_path: Path) -> None:
    """A library that is not there is a reason, not an exception."""
    driver = extension.load(str(tmp_path / "libnone.so.1"))
    assert (driver.path, driver.version) == ("none", 0)
    assert driver.reason.startswith("no driver: ")
    assert "libnone.so.1" in driver.reason


def test_library_path_may_be_a_path_object(extension: ModuleType, fake: FakeDriver) -> None:
    """load() takes what os.fspath takes."""
    assert extension.load(fake.library).path == "batch"


@pytest.mark.parametrize("arguments", [(1,), ("a", "b"), ("a\0b",)])
def test_load_refuses_other_arguments(extension: ModuleType, arguments: tuple[object, ...]) -> None:
    """load() takes one path at most."""
    with pytest.raises((TypeError, ValueError)):
        extension.load(*arguments)


def test_not_supported_is_remembered_per_device(fake: FakeDriver, copying: Copying) -> None:
    """A device that answers NOT_SUPPORTED gets one call per range, and is not asked for a batch again."""
    fake.knobs.devices_without_batches = 1 << 0
    driver = fake.load()
    fake.forget()
    assert describe(driver, 0).path == "batch"
    assert copying.submit(driver) == "ranges"
    assert fake.calls == ["cuMemcpyBatchAsync"] + ["cuMemcpyAsync"] * 3
    np.testing.assert_array_equal(copying.dst, copying.expected)
    fake.forget()
    assert copying.submit(driver) == "ranges"
    assert fake.calls == ["cuMemcpyAsync"] * 3
    assert describe(driver, 0) == BatchCopyStatus("ranges", "batched copies not supported on device 0", 13000)
    assert describe(driver, 1) == BatchCopyStatus("batch", None, 13000)


def test_other_devices_keep_their_batches(fake: FakeDriver, copying: Copying) -> None:
    """One device's refusal does not speak for another."""
    fake.knobs.devices_without_batches = 1 << 0
    driver = fake.load()
    in_own_thread(lambda: copying.submit(driver))
    assert in_own_thread(lambda: copying.submit(driver, device=1)) == "batch"


@pytest.mark.parametrize("stream", [0, 1])
def test_legacy_default_stream_takes_ranges(fake: FakeDriver, copying: Copying, stream: int) -> None:
    """The batch call refuses the legacy default stream, so it is not tried there."""
    driver = fake.load()
    fake.forget()
    assert copying.submit(driver, stream=stream) == "ranges"
    assert fake.calls == ["cuMemcpyAsync"] * 3
    assert driver.supports(0)


def test_per_thread_default_stream_takes_the_batch(fake: FakeDriver, copying: Copying) -> None:
    """CU_STREAM_PER_THREAD is not the legacy default stream."""
    assert copying.submit(fake.load(), stream=2) == "batch"


def test_ranges_can_be_forced(fake: FakeDriver, copying: Copying) -> None:
    """batch=False takes one call per range of a driver that has batches."""
    driver = fake.load()
    fake.forget()
    assert copying.submit(driver, batch=False) == "ranges"
    assert fake.calls == ["cuMemcpyAsync"] * 3


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


def test_gil_is_released_in_the_driver(fake: FakeDriver, copying: Copying) -> None:
    """Another Python thread runs while the driver call blocks: it is the one that lets it go on."""
    fake.knobs.hold = 1
    driver = fake.load()
    fake.forget()

    def let_go_once_it_is_in() -> None:
        fake.wait_until_held()
        fake.release()

    other = threading.Thread(target=let_go_once_it_is_in)
    other.start()
    assert copying.submit(driver) == "batch"
    other.join()


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
    """Threads that use one plan on tables of their own do not mix up addresses."""
    driver = fake.load()
    plan = TransferPlan([0, 4], [5, 2], [2, 3])
    src = np.arange(32, dtype=np.int32).reshape(8, 4)
    tables = [np.full((8, 4), -1, dtype=np.int32) for _ in range(8)]
    threads = [
        threading.Thread(target=plan.submit, args=(driver, src.ctypes.data, dst.ctypes.data, 16, STREAM, 0))
        for dst in tables
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for dst in tables:
        np.testing.assert_array_equal(dst[2:7], src[[4, 5, 6, 0, 1]])


def test_extension_that_was_not_built() -> None:
    """Without the extension there is a stand-in that says so."""
    driver = load_driver(extension="epd.kernels._never_built")
    status = describe(driver, 0)
    assert status.path == "copy_"
    assert status.reason is not None
    assert status.reason.startswith("the C extension is not there: ")
    assert not driver.supports(0)


def test_load_driver_finds_the_extension(
    extension: ModuleType, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """load_driver imports the extension by name and opens the library given."""
    monkeypatch.syspath_prepend(str(Path(str(extension.__file__)).parent))
    assert load_driver(str(fake.library), extension="_batch_copy").path == "batch"


def test_default_driver_is_opened_once() -> None:
    """The process has one driver, whatever this machine offers."""
    assert default_driver() is default_driver()
    assert default_driver().path in ("batch", "ranges", "none")


T = TypeVar("T")


def in_own_thread(work: Callable[[], T]) -> T:
    """Runs `work` in a new thread, which has no CUDA context yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
