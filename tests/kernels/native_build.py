"""Compiles the C extension and the fake driver for tests, into a folder of the caller's."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
EXTENSION_SOURCE = HERE.parents[1] / "kernels" / "_batch_copy.c"
FAKE_DRIVER_SOURCE = HERE / "fake_driver.c"
WARNINGS = ("-Wall", "-Wextra", "-Werror")

EXTRA_FLAGS = "EPD_TEST_CFLAGS"
"""Environment variable with further compiler flags, such as `-fsanitize=address`."""


def default_compiler() -> str | None:
    """The compiler that tests use, or None where there is none."""
    return next((found for name in ("gcc", "clang", "cc") if (found := shutil.which(name))), None)


def compile_shared(source: Path, output: Path, *flags: str, compiler: str | None = None) -> Path:
    """Compiles one C file to a shared library without warnings. Raises CalledProcessError with the output."""
    compiler = compiler or default_compiler()
    assert compiler is not None, "no C compiler; the caller should have skipped"
    extra = shlex.split(os.environ.get(EXTRA_FLAGS, ""))
    command = [
        compiler,
        "-O1",
        "-g",
        *WARNINGS,
        "-fPIC",
        "-shared",
        *flags,
        *extra,
        str(source),
        "-o",
        str(output),
    ]
    result = subprocess.run([*command, "-ldl", "-lpthread"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise subprocess.CalledProcessError(result.returncode, shlex.join(command) + "\n" + result.stderr)
    return output


def compile_extension(folder: Path, *flags: str, compiler: str | None = None) -> Path:
    """`_batch_copy.abi3.so` in `folder`, against the stable ABI that setup.py asks for."""
    include = sysconfig.get_path("include")
    return compile_shared(
        EXTENSION_SOURCE,
        folder / "_batch_copy.abi3.so",
        "-DPy_LIMITED_API=0x030B0000",
        f"-I{include}",
        *flags,
        compiler=compiler,
    )


def compile_fake_driver(output: Path, *flags: str, compiler: str | None = None) -> Path:
    """The fake driver library at `output`. Flags `-DFAKE_WITHOUT_...` leave symbols out."""
    return compile_shared(FAKE_DRIVER_SOURCE, output, *flags, compiler=compiler)


def import_extension(path: Path) -> ModuleType:
    """The extension at `path`, not entered in `sys.modules`."""
    name = "epd.kernels._batch_copy"
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
