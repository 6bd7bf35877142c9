"""`epd serve`: the command that it becomes, and the environment that it hands on."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

import pytest

from epd.cli.serve import default_config, run, with_start_flags

CONFIG = "applications: [{{name: epd, import_path: 'epd.deployments.app:build', args: {args}}}]\n"


class FakeExecute:
    """Remembers what would be executed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], dict[str, str]]] = []

    def __call__(self, program: str, arguments: list[str], environ: dict[str, str]) -> None:
        self.calls.append((program, arguments, environ))


def options(config: str | None, *, haproxy: bool = False) -> argparse.Namespace:
    return argparse.Namespace(config=config, haproxy=haproxy)


@pytest.fixture
def other_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ray that runs already: its ports are in use, and rightly so."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")


@pytest.mark.usefixtures("other_ray")
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


@pytest.mark.usefixtures("other_ray")
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


@pytest.mark.usefixtures("other_ray")
def test_haproxy_is_asked_for_by_name() -> None:
    """Serve's own proxy is the default."""
    execute = FakeExecute()
    run(options(None), execute)
    run(options(None, haproxy=True), execute)
    asked = [environ.get("RAY_SERVE_ENABLE_HA_PROXY") for _, _, environ in execute.calls]
    assert asked == [None, "1"]


def test_a_missing_config_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started."""
    execute = FakeExecute()
    assert run(options("/no/such.yaml"), execute) == 1
    assert "no such file" in capsys.readouterr().err
    assert execute.calls == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "cannot be read"),
        ("a: 1", "no list of `applications`"),
        (CONFIG.format(args="{model: {pth: demo}}"), "args.model.pth: Extra inputs are not permitted"),
        (CONFIG.format(args="{store: {timeout_s: soon}}"), "args.store.timeout_s: Input should be a valid"),
    ],
)
def test_a_config_that_is_wrong_is_said_in_a_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong and where, before anything is started."""
    config = tmp_path / "mine.yaml"
    config.write_text(text)
    execute = FakeExecute()
    assert run(options(str(config)), execute) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("epd serve: ")
    assert words in line
    assert execute.calls == []


@pytest.mark.parametrize("setting", ["http_options.port", "store.address"])
def test_a_port_in_use_is_said(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two services would else listen on one port, and share its clients."""
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        ports = {"http_options.port": free.getsockname()[1], "store.address": free.getsockname()[1]}
        free.close()
        ports[setting] = taken.getsockname()[1]
        config = tmp_path / "mine.yaml"
        store = f"127.0.0.1:{ports['store.address']}"
        text = CONFIG.format(args=f"{{store: {{address: '{store}'}}}}")
        config.write_text(f"{text}http_options: {{port: {ports['http_options.port']}}}\n")
        execute = FakeExecute()
        assert run(options(str(config)), execute) == 1
    assert f"epd serve: {setting}: port {ports[setting]}" in capsys.readouterr().err
    assert execute.calls == []
