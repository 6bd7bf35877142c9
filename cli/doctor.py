"""`epd doctor`: what this machine has, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from epd.kernels.batch_copy import BatchCopyStatus

# Library: Debian's package. What Mooncake's engine links to.
MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
    "libcurl.so.4": "libcurl4",
}
SHM = Path("/dev/shm")
GIB = 2**30
Level = Literal["ok", "note", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `missing`: the service needs it; `note`: it runs, and could do better."""

    subject: str
    level: Level
    found: str
    advice: str = ""


def run(_options: argparse.Namespace) -> int:
    """Prints a line for each finding; 1 when something is missing that the service needs."""
    findings = list(examine())
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.level:<8}{finding.subject:<{width + 2}}{finding.found}")
        if finding.advice:
            print(f"{'':<8}{'':<{width + 2}}-> {finding.advice}")
    missing = [finding.subject for finding in findings if finding.level == "missing"]
    print(f"\nmissing: {', '.join(missing)}" if missing else "\nall that the service needs is there")
    return 1 if missing else 0


def examine() -> Iterator[Finding]:
    """Everything, in the order in which one thing needs another."""
    yield check_python(sys.version_info[:2])
    for package in ("torch", "transformers", "ray"):
        yield check_package(package)
    if _has("torch"):
        yield from check_torch()
    yield check_libraries(_loads)
    yield check_mooncake()
    yield check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield check_shared_memory(shutil.disk_usage(SHM).total if SHM.is_dir() else 0)
    yield check_cores(os.cpu_count() or 1)


def check_python(found: tuple[int, ...]) -> Finding:
    """3.11 is the oldest that works."""
    name = f"{'.'.join(map(str, found))} on {platform.machine()} {platform.system()}"
    if found < (3, 11):
        return Finding("Python", "missing", name, "install Python 3.11 or newer")
    return Finding("Python", "ok", name)


def check_package(name: str) -> Finding:
    """A package that the service imports."""
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", "pip install epd")


def check_torch() -> Iterator[Finding]:
    """CUDA, the driver's batched copy, and flash-attn: what makes a GPU fast."""
    import torch

    from epd.kernels.transfer import batch_copy_status

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        yield Finding("CUDA", "ok", f"{torch.version.cuda}: {', '.join(names)}")
        yield check_batched_copy(batch_copy_status())
        yield check_flash_attention()
        return
    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch has no CUDA"
    advice = "nvidia-smi says whether the driver is there" if torch.version.cuda else ""
    yield Finding("CUDA", "note", f"no GPU ({built}): everything runs on the CPU", advice)
    yield Finding("batched copy", "note", f"not used without a GPU: {batch_copy_status().reason}")
    yield Finding("flash-attn", "note", "not used without a GPU")


def check_batched_copy(status: BatchCopyStatus) -> Finding:
    """Whether the driver takes all ranges of a copy in one call; without it each is a call."""
    if status.path == "batch":
        driver = f"driver {status.driver_version // 1000}.{status.driver_version % 1000 // 10}"
        return Finding("batched copy", "ok", f"one call for all ranges, {driver}")
    advice = "needs a driver of CUDA 12.8 or newer, and a C compiler when epd is installed"
    return Finding("batched copy", "note", f"{status.path}: {status.reason}", advice)


def check_flash_attention() -> Finding:
    """Optional: torch's own kernel stands in for it."""
    try:
        return Finding("flash-attn", "ok", version("flash_attn"))
    except PackageNotFoundError:
        return Finding(
            "flash-attn", "note", "not installed: torch's own kernel is used", "pip install 'epd[cuda]'"
        )


def check_libraries(loads: Callable[[str], bool]) -> Finding:
    """The system libraries that Mooncake links to."""
    lacking = [name for name in MOONCAKE_LIBRARIES if not loads(name)]
    if not lacking:
        return Finding("Mooncake's libraries", "ok", ", ".join(MOONCAKE_LIBRARIES))
    packages = " ".join(MOONCAKE_LIBRARIES[name] for name in lacking)
    return Finding(
        "Mooncake's libraries", "missing", f"no {', '.join(lacking)}", f"apt-get install {packages}"
    )


def check_mooncake() -> Finding:
    """The store itself, as the service loads it."""
    from epd.cache.errors import StoreUnavailable
    from epd.cache.stores.mooncake_library import import_store, master_path

    try:
        import_store()
        return Finding("Mooncake", "ok", str(master_path()))
    except StoreUnavailable as error:
        return Finding("Mooncake", "missing", str(error))


def check_locked_memory(limit: int) -> Finding:
    """RDMA registers the page pool, which must then be locked; TCP does not."""
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "unlimited")
    advice = "RDMA needs `ulimit -l unlimited` (in a container: --ulimit memlock=-1); TCP does not"
    return Finding("locked memory", "note", f"{limit / GIB:.2f} GiB", advice)


def check_shared_memory(num_bytes: int) -> Finding:
    """Ray's object store lives there; less than 2 GiB makes it fall back to the disk for large batches."""
    found = f"{num_bytes / GIB:.1f} GiB"
    if num_bytes >= 2 * GIB:
        return Finding("/dev/shm", "ok", found)
    return Finding("/dev/shm", "note", found, "give Ray's object store room: in a container --shm-size=4g")


def check_cores(count: int) -> Finding:
    """Two cores carry the application; more make it faster."""
    if count >= 2:
        return Finding("CPU cores", "ok", str(count))
    return Finding("CPU cores", "note", str(count), "replicas of both stages share one core")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
