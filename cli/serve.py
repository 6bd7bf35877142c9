"""`epd serve`: Ray Serve's own `serve run`, with the environment that Ray must find when it starts."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import epd

# Read by Ray as it starts, so too late in a config file. Workers run at nice 15 unless told otherwise.
START_FLAGS = {"RAY_worker_niceness": "0"}
Execute = Callable[[str, list[str], dict[str, str]], None]


def run(options: argparse.Namespace, execute: Execute = os.execve) -> int:
    """Becomes `serve run`; returns 1 when that cannot be."""
    config = Path(options.config) if options.config else default_config()
    program = serve_program()
    if not config.is_file() or program is None:
        reason = f"no such file: {config}" if program else "Ray Serve is not installed: pip install epd"
        print(f"epd serve: {reason}", file=sys.stderr)
        return 1
    execute(program, [program, "run", str(config)], with_start_flags(os.environ))
    return 0


def with_start_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with Ray's start flags; those that the user has set stay."""
    return {**START_FLAGS, **environ}


def default_config() -> Path:
    """The config file that comes with the package: one host, the demo checkpoint."""
    return Path(epd.__file__).parent / "configs" / "epd.yaml"


def serve_program() -> str | None:
    """Ray Serve's command: the one beside this interpreter, else the one on the path."""
    beside = Path(sys.executable).with_name("serve")
    return str(beside) if beside.is_file() else shutil.which("serve")
