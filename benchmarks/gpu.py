"""Checks and times everything that needs a GPU, in one run of under five minutes:

    python -m benchmarks.gpu

Tests first, those marked `cuda` among them, then copies (`benchmarks.gpu_copy`) and attention
(`benchmarks.gpu_attention`), each of which prints its table and goals and keeps them in benchmarks/results/.
The package need not be installed. Exits with 1 when anything failed. Never executed on a device yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STEPS = (
    [
        "-m",
        "pytest",
        "-q",
        "-m",
        "cuda or not cluster and not long",
        "tests/kernels",
        "tests/models/test_cuda.py",
    ],
    ["-m", "benchmarks.gpu_copy"],
    ["-m", "benchmarks.gpu_attention"],
)


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    failed = []
    for step in STEPS:
        print("$ python", *step, flush=True)
        if subprocess.run([sys.executable, *step], cwd=root, env=environment, check=False).returncode:
            failed.append(" ".join(step))
    print("failed:", "; ".join(failed) if failed else "nothing")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
