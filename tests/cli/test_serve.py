"""`epd serve`: the command that it becomes, and the environment that it hands on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from epd.cli.serve import default_config, run, with_start_flags


class FakeExecute:
    """Remembers what would be executed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], dict[str, str]]] = []

    def __call__(self, program: str, arguments: list[str], environ: dict[str, str]) -> None:
        self.calls.append((program, arguments, environ))


def options(config: str | None) -> argparse.Namespace:
    return argparse.Namespace(config=config)


def test_it_becomes_serve_run(tmp_path: Path) -> None:
    """The `serve run` that drains, with the flags that Ray reads as it starts."""
    config = tmp_path / "mine.yaml"
    config.write_text("applications: []\n")
    execute = FakeExecute()
    assert run(options(str(config)), execute) == 0
    ((program, arguments, environ),) = execute.calls
    assert program == sys.executable
    assert arguments == [program, "-m", "epd.deployments.run", str(config)]
    assert "RAY_worker_niceness" in environ


def test_without_a_config_the_packages_own_is_served() -> None:
    """One host and the demo checkpoint."""
    execute = FakeExecute()
    assert run(options(None), execute) == 0
    assert execute.calls[0][1][-1] == str(default_config())
    assert default_config().is_file()


def test_flags_are_set_unless_the_user_has_set_them() -> None:
    """A flag in the environment wins over the default; the rest of the environment stays."""
    assert with_start_flags({"HOME": "/"}) == {"RAY_worker_niceness": "0", "HOME": "/"}
    assert with_start_flags({"RAY_worker_niceness": "5"}) == {"RAY_worker_niceness": "5"}


def test_a_missing_config_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started."""
    execute = FakeExecute()
    assert run(options("/no/such.yaml"), execute) == 1
    assert "no such file" in capsys.readouterr().err
    assert execute.calls == []
