"""Every way through the C extension, as a plain program for valgrind and the address sanitizer.

    python -m tests.kernels.exercise_batch_copy EXTENSION LIBFAKE LIBFAKE_WITHOUT_LOOKUP LIBFAKE_WITHOUT_COPY

It imports little, so that it runs in seconds under valgrind. What each way should do is stated in
test_batch_copy*.py; here the memory is what matters, so each way is gone several times.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.kernels.fake_driver import ILLEGAL_ADDRESS, INVALID_CONTEXT, INVALID_VALUE, FakeDriver
from tests.kernels.native_build import import_extension

if TYPE_CHECKING:
    from epd.kernels.batch_copy import Driver

STREAM = 0x7000


class Bytes:
    """Ten bytes to be copied as three ranges."""

    def __init__(self) -> None:
        self.src = array("b", range(64))
        self.dst = array("b", [-1] * 32)
        src, dst = self.src.buffer_info()[0], self.dst.buffer_info()[0]
        self.table: Any = array("q", [dst + 2, dst + 6, dst + 10, src + 1, src + 11, src + 23, 4, 4, 2])
        self.scratch: Any = array("q", [0] * 9)

    def submit(
        self,
        driver: Driver,
        *,
        stream: int = STREAM,
        device: int = 0,
        batch: bool = True,
        any_order: bool = False,
    ) -> str:
        return driver.copy(self.table, self.scratch, 0, 0, 1, stream, device, batch, any_order)

    def check(self) -> None:
        copied = [*range(1, 5), *range(11, 15), 23, 24]
        assert self.dst.tolist() == [-1] * 2 + copied + [-1] * 20


def succeed(driver: Driver, *, stream: int = STREAM, batch: bool = True, any_order: bool = False) -> str:
    data = Bytes()
    path = data.submit(driver, stream=stream, batch=batch, any_order=any_order)
    data.check()
    return path


def refuse(call: Callable[[], object], *errors: type[Exception]) -> None:
    try:
        call()
    except errors:
        return
    raise AssertionError("not refused")


def good_ways(fake: FakeDriver) -> None:
    driver = fake.load()
    assert succeed(driver) == "batch"
    assert succeed(driver, any_order=True) == "batch"
    assert succeed(driver, stream=0) == "ranges"
    assert succeed(driver, batch=False) == "ranges"
    nothing: Any = array("q")
    driver.copy(nothing, nothing, 0, 0, 1, STREAM, 0, True, False)
    thread = Thread(target=succeed, args=(driver,))
    thread.start()
    thread.join()
    fake.knobs.devices_without_batches = 1
    assert driver.supports(0)
    assert [succeed(driver), succeed(driver)] == ["ranges", "ranges"]
    assert not driver.supports(0)


def lesser_drivers(fake: FakeDriver) -> None:
    for knob, value in (("version", 12040), ("lookup_status", 1), ("lookup_result", INVALID_VALUE)):
        before = getattr(fake.knobs, knob)
        setattr(fake.knobs, knob, value)
        driver = fake.load()
        setattr(fake.knobs, knob, before)
        assert driver.path == "ranges"
        assert driver.reason
        assert succeed(driver) == "ranges"
    fake.knobs.version_result = INVALID_VALUE
    assert fake.load().path == "none"


def driver_errors(fake: FakeDriver) -> None:
    driver, data = fake.load(), Bytes()
    fake.knobs.deferred = 1
    for knob, batch in (("batch_result", True), ("copy_result", False)):
        for fail_index in (2, 0, -1):
            if batch or fail_index >= 0:
                FakeDriver(fake.library, fake.extension)
                setattr(fake.knobs, knob, ILLEGAL_ADDRESS)
                fake.knobs.fail_index = fail_index
                refuse(partial(data.submit, driver, batch=batch), RuntimeError)
    fake.knobs.synchronize_result = 12345
    refuse(lambda: data.submit(driver, batch=False), RuntimeError)
    FakeDriver(fake.library, fake.extension)
    fake.knobs.context_result = INVALID_CONTEXT
    refuse(lambda: data.submit(fake.load()), RuntimeError)
    refuse(lambda: data.submit(driver, device=63), RuntimeError)


def wrong_arguments(fake: FakeDriver) -> None:
    driver: Any = fake.load()
    data = Bytes()
    good = (data.table, data.scratch, 0, 0, 1, STREAM, 0, True, False)
    odd = memoryview(array("b", bytes(73)))[1:]
    for place, value, error in (
        (0, None, TypeError),
        (1, None, TypeError),
        (1, bytes(72), BufferError),
        (1, array("q", [1]), ValueError),
        (0, odd, ValueError),
        (1, odd, ValueError),
        (2, "0", TypeError),
        (4, 1 << 64, OverflowError),
        (6, -1, ValueError),
        (6, 1 << 70, OverflowError),
    ):
        refuse(partial(driver.copy, *good[:place], value, *good[place + 1 :]), error)
    refuse(lambda: driver.copy(data.table), TypeError)
    refuse(lambda: driver.supports("0"), TypeError)
    refuse(lambda: driver.supports(64), ValueError)
    refuse(type(driver), TypeError)


def no_drivers(extension: ModuleType, without_lookup: Path, without_copy: Path) -> None:
    assert succeed(FakeDriver(without_lookup, extension).load()) == "ranges"
    for library in (without_copy, Path("/nowhere/" + 300 * "x")):
        driver = extension.load(str(library))
        assert driver.path == "none"
        assert driver.reason
        refuse(partial(Bytes().submit, driver), RuntimeError)
    refuse(lambda: extension.load(1), TypeError)
    refuse(lambda: extension.load("a", "b"), TypeError)


def main(extension_path: str, library: str, without_lookup: str, without_copy: str) -> None:
    extension = import_extension(Path(extension_path))
    for _ in range(3):
        for way in (good_ways, lesser_drivers, driver_errors, wrong_arguments):
            way(FakeDriver(Path(library), extension))
        no_drivers(extension, Path(without_lookup), Path(without_copy))
    print("exercised")


if __name__ == "__main__":
    main(*sys.argv[1:])
