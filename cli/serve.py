"""`epd serve`: `serve run`, with the environment that Ray must find as it starts; its Ctrl-C drains."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import epd
from epd.cli.serve_config import problems
from epd.deployments.replica import HAPROXY_FLAGS, START_FLAGS

Execute = Callable[[str, list[str], dict[str, str]], None]


def run(options: argparse.Namespace, execute: Execute = os.execve) -> int:
    """Becomes `epd.deployments.run`; returns 1 when the config cannot be served."""
    config = Path(options.config) if options.config else default_config()
    if not config.is_file():
        print(f"epd serve: no such file: {config}", file=sys.stderr)
        return 1
    if found := problems(config, starts_ray="RAY_ADDRESS" not in os.environ):
        for problem in found:
            print(f"epd serve: {problem}", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "epd.deployments.run", str(config)]
    execute(sys.executable, command, with_start_flags(os.environ, haproxy=options.haproxy))
    return 0


def with_start_flags(environ: Mapping[str, str], *, haproxy: bool = False) -> dict[str, str]:
    """The environment with Ray's start flags; those that the user has set stay."""
    return {**START_FLAGS, **(HAPROXY_FLAGS if haproxy else {}), **environ}


def default_config() -> Path:
    """The config file that comes with the package: one host, the demo checkpoint."""
    return Path(epd.__file__).parent / "configs" / "epd.yaml"
