"""What every benchmark prints alike: the machine it ran on, and tables. Imports nothing heavy."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def processor() -> str:
    """Name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_average() -> str:
    """Runnable processes over the last minute."""
    loadavg = Path("/proc/loadavg")
    return loadavg.read_text().split()[0] if loadavg.exists() else "unknown"


def machine(*details: str) -> str:
    """One line: date, processor, Python, `details`, load."""
    python = f"Python {platform.python_version()}"
    parts = [date.today().isoformat(), processor(), python, *details, f"load {load_average()} at the start"]
    return ", ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns lined up to the right, the first to the left."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join([first.lstrip().ljust(widths[0]), *others]).rstrip())
    return "\n".join(lines)
