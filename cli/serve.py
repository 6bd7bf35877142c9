"""`epd serve`: `serve run`, with the environment that Ray must find as it starts; its Ctrl-C drains."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import epd
from epd.deployments.replica import START_FLAGS

Execute = Callable[[str, list[str], dict[str, str]], None]


def run(options: argparse.Namespace, execute: Execute = os.execve) -> int:
    """Becomes `epd.deployments.run`; returns 1 when there is no config."""
    config = Path(options.config) if options.config else default_config()
    if not config.is_file():
        print(f"epd serve: no such file: {config}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "epd.deployments.run", str(config)]
    execute(sys.executable, command, with_start_flags(os.environ))
    return 0


def with_start_flags(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with Ray's start flags; those that the user has set stay."""
    return {**START_FLAGS, **environ}


def default_config() -> Path:
    """The config file that comes with the package: one host, the demo checkpoint."""
    return Path(epd.__file__).parent / "configs" / "epd.yaml"
