"""Fixtures around the compiled C extension and the fake driver library."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.kernels.copying import Copying
from tests.kernels.fake_driver import FakeDriver
from tests.kernels.native_build import (
    compile_extension,
    compile_fake_driver,
    default_compiler,
    import_extension,
)


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for compiled files; skips where nothing can be compiled."""
    if default_compiler() is None:
        pytest.skip("no C compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("no headers of Python")
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="session")
def extension(build_folder: Path) -> ModuleType:
    """The real extension, freshly compiled."""
    return import_extension(compile_extension(build_folder))


@pytest.fixture(scope="session")
def fake_library(build_folder: Path) -> Path:
    """The fake driver library with every symbol."""
    return compile_fake_driver(build_folder / "libfake.so")


@pytest.fixture
def fake(fake_library: Path, extension: ModuleType) -> FakeDriver:
    """The fake driver with its knobs at rest."""
    return FakeDriver(fake_library, extension)


@pytest.fixture
def copying() -> Copying:
    """Fresh rows and the ranges between them."""
    return Copying()
