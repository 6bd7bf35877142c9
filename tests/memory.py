"""Memory of this process, as the kernel counts it: what Pillow and torch allocate is seen too."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_growth(call: Callable[[], object]) -> int:
    """Bytes by which the resident set rises at most while `call` runs."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    before = _read("VmHWM")
    call()
    return _read("VmHWM") - before


def resident() -> int:
    """Bytes in memory now."""
    gc.collect()
    return _read("VmRSS")


def _read(name: str) -> int:
    (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
