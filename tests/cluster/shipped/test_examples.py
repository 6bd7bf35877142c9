"""The programs in examples/, run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from epd.demo.shapes import CLASSES, caption, generator, render
from tests.cluster.server import ROOT, Server

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rendering of each of twelve classes, that nobody trained on."""
    folder = tmp_path_factory.mktemp("pictures")
    rng = generator("examples", 0)
    for what in CLASSES[::4]:
        render(what, rng).save(folder / f"{what.colour}-{what.shape}.png")
    return folder


@pytest.mark.parametrize("options", [["--url"], ["--handle"]])
def test_search_ranks_the_picture_of_the_caption_first(
    server: Server, folder: Path, options: list[str]
) -> None:
    """The search example finds the picture that a caption describes, over HTTP and through a handle."""
    what = CLASSES[8]
    if options == ["--url"]:
        options = ["--url", server.url]
    command = [sys.executable, "examples/search.py", str(folder), caption(what), *options]
    run = subprocess.run(
        command, cwd=ROOT, env=server.cluster_env(), capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    first = run.stdout.splitlines()[0]
    assert first.split()[-1] == f"{what.colour}-{what.shape}.png", run.stdout


def test_a_second_search_encodes_nothing(server: Server, folder: Path) -> None:
    """Searching a folder again finds every picture's rows."""
    command = [sys.executable, "examples/search.py", str(folder), "anything", "--url", server.url]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    before = server.counter("encoder", "encodes")
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    assert server.counter("encoder", "encodes") == before
