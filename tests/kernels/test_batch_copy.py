"""The real C extension against the fake driver library: paths, status, and what the driver is asked."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from epd.kernels.batch_copy import BatchCopyStatus, default_driver, describe, load_driver
from tests.kernels.copying import STREAM, Copying, in_own_thread
from tests.kernels.fake_driver import (
    INVALID_VALUE,
    FakeDriver,
)
from tests.kernels.native_build import compile_fake_driver


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
