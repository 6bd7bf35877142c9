"""How the C extension compiles, what it links, and its memory under a sanitizer and valgrind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.kernels.exercise_batch_copy import succeed
from tests.kernels.fake_driver import FakeDriver
from tests.kernels.native_build import (
    EXTENSION_SOURCE,
    FAKE_DRIVER_SOURCE,
    WARNINGS,
    compile_extension,
    compile_fake_driver,
)

ROOT = EXTENSION_SOURCE.parents[1]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


def tool(name: str) -> str:
    """Path of an installed program; skips the test where it is absent."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("optimisation", ["-O0", "-O3"])
def test_compiles_without_warnings(tmp_path: Path, compiler: str, optimisation: str) -> None:
    """-Wall -Wextra -Werror, and stricter, with gcc and clang."""
    assert set(WARNINGS) == {"-Wall", "-Wextra", "-Werror"}
    strict = (optimisation, "-std=gnu11", "-Wshadow", "-Wconversion")
    compile_extension(tmp_path, *strict, compiler=tool(compiler))
    compile_fake_driver(tmp_path / "libfake.so", optimisation, compiler=tool(compiler))


def cuda_include() -> Path:
    """Folder of NVIDIA's headers; skips where there is no toolkit."""
    homes = [
        os.environ.get("CUDA_HOME", ""),
        *sorted(map(str, Path("/usr/local").glob("cuda*")), reverse=True),
    ]
    for home in filter(None, homes):
        header = Path(home) / "include" / "cudaTypedefs.h"
        if header.exists() and "PFN_cuMemcpyBatchAsync_v12080" in header.read_text():
            return header.parent
    pytest.skip("no CUDA headers of 12.8 or later")


def test_fake_driver_has_nvidias_interface(
    extension: ModuleType, fake: FakeDriver, build_folder: Path
) -> None:
    """Compiled against NVIDIA's own headers the fake has the same functions and layout, and works."""
    library = compile_fake_driver(
        build_folder / "libfake_nvidia.so", "-DFAKE_USE_CUDA_HEADER", "-isystem", str(cuda_include())
    )
    genuine = FakeDriver(library, extension)
    assert genuine.layout() == fake.layout()
    assert succeed(genuine.load()) == "batch"
    assert (genuine.last_batch.source_order, genuine.last_batch.hints) == (1, 0)


def test_layout_is_the_published_one(fake: FakeDriver) -> None:
    """Size and offsets of CUmemcpyAttributes, in bytes, where no header is at hand to compare with."""
    assert fake.layout() == [24, 0, 4, 12, 20, 8]


def test_links_nothing_of_cuda(extension: ModuleType) -> None:
    """The libraries that the extension needs are the C library's."""
    listing = subprocess.run(
        [tool("readelf"), "-d", str(extension.__file__)], capture_output=True, text=True, check=True
    ).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", listing)
    assert all(re.match(r"lib(c|dl|pthread|asan|ubsan)\.so", name) for name in needed), needed


def build_ext(tmp_path: Path, **environment: str) -> list[str]:
    """Runs setup.py's build_ext into a folder of its own; the names of what it built."""
    folders = ("--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp"))
    command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, check=True)
    return [str(path.relative_to(tmp_path / "lib")) for path in tmp_path.rglob("lib/**/*.so")]


def test_setup_builds_for_the_stable_abi(extension: ModuleType, tmp_path: Path) -> None:
    """setup.py makes one file for all Pythons from 3.11 on."""
    assert build_ext(tmp_path) == ["epd/kernels/_batch_copy.abi3.so"]


def test_setup_goes_on_without_a_compiler(tmp_path: Path) -> None:
    """Where nothing compiles, the build succeeds without the extension."""
    assert build_ext(tmp_path, CC="/nowhere/cc") == []


def exercise(folder: Path, *flags: str) -> list[str]:
    """The command that goes every way through the extension, compiled with `flags`."""
    libraries = [compile_extension(folder, *flags)]
    for name in ("EVERYTHING", "WITHOUT_LOOKUP", "WITHOUT_COPY"):
        libraries.append(compile_fake_driver(folder / f"libfake_{name}.so", f"-DFAKE_{name}", *flags))
    return [sys.executable, "-m", "tests.kernels.exercise_batch_copy", *map(str, libraries)]


def run_exercise(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "PYTHONMALLOC": "malloc"} | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_address_sanitizer_finds_nothing(build_folder: Path, tmp_path: Path) -> None:
    """Every path and refusal, and the leak check at exit, under the address and undefined sanitizers."""
    gcc = tool("gcc")
    preload = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run([gcc, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        if not Path(found.stdout.strip()).is_absolute():
            pytest.skip(f"gcc has no {name}")
        preload.append(found.stdout.strip())
    command = exercise(tmp_path, *SANITIZERS)
    result = run_exercise(command, LD_PRELOAD=" ".join(preload), ASAN_OPTIONS="detect_leaks=1:exitcode=7")
    assert (result.returncode, result.stdout) == (0, "exercised\n"), result.stderr


@pytest.mark.long
def test_valgrind_finds_nothing(build_folder: Path, tmp_path: Path) -> None:
    """Every path and refusal under valgrind; reports from inside the interpreter alone are not ours."""
    valgrind = tool("valgrind")
    log = tmp_path / "valgrind.log"
    options = ["--leak-check=full", "--show-leak-kinds=definite,indirect,possible", "--num-callers=40"]
    command = [valgrind, *options, f"--log-file={log}", *exercise(tmp_path)]
    result = run_exercise(command)
    assert (result.returncode, result.stdout) == (0, "exercised\n"), result.stderr
    reports = re.split(r"^==\d+== $\n", log.read_text(), flags=re.MULTILINE)
    assert len(reports) > 2, "valgrind wrote no summary"
    ours = [r for r in reports if f"({EXTENSION_SOURCE.name}:" in r or f"({FAKE_DRIVER_SOURCE.name}:" in r]
    assert ours == []
