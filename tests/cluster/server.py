"""The real application in real processes: `serve run` on a config, real HTTP, real ends."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import yaml

ROOT = Path(__file__).resolve().parents[2]
_MARK = "EPD_TEST_SERVER"

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value | None], timeout_s: float, what: str) -> Value:
    """The first true value of `condition`. Raises TimeoutError saying `what` was awaited."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {timeout_s} s")
        time.sleep(0.05)
    return value


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


class Server:
    """`serve run` of configs/epd.yaml, on free ports, with changes to its arguments; ended by Ctrl-C.

    args: merged into the application's `args`, one level deep. deployments: replaces that list. config: which
    file to start from. program: what to start in place of `serve run`.
    """

    def __init__(
        self,
        args: dict[str, dict[str, Any]] | None = None,
        deployments: list[dict[str, Any]] | None = None,
        config: str = "configs/epd.yaml",
        start_timeout_s: float = 120,
        program: Sequence[str] = (str(Path(sys.executable).with_name("serve")), "run"),
    ) -> None:
        http_port, rpc_port, self.metrics_port = free_ports(3)
        self.url = f"http://127.0.0.1:{http_port}"
        document = yaml.safe_load((ROOT / config).read_text())
        document["http_options"]["port"] = http_port
        (application,) = document["applications"]
        if deployments is not None:
            application["deployments"] = deployments
        if application["args"].get("store", {}).get("backend", "mooncake") == "mooncake":
            store = {"address": f"127.0.0.1:{rpc_port}", "metrics_port": self.metrics_port}
            application["args"].setdefault("store", {}).update(store)
        for name, changes in (args or {}).items():
            application["args"].setdefault(name, {}).update(changes)
        self._folder = Path(tempfile.mkdtemp(prefix="epd-"))
        self.config = self._folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(document))
        self.document = document
        self.log = self._folder / "serve.log"
        self._mark = uuid.uuid4().hex
        self._start_timeout_s = start_timeout_s
        self._program = program
        self._interrupted = False

    def __enter__(self) -> Self:
        env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        env |= {_MARK: self._mark, "RAY_TMPDIR": str(self._folder), "RAY_worker_niceness": "0"}
        env["RAY_raylet_start_wait_time_s"] = "120"  # a busy machine is slow, not broken
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._program, str(self.config)],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(self._healthy, self._start_timeout_s, "the application's start")
        except BaseException:
            print(self.log.read_text())
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log.read_text()[-20000:])
        self.stop()

    def stop(self) -> int:
        """Ctrl-C, then waits. Returns the exit code. Removes what the server wrote."""
        if self._process.poll() is None:
            self.interrupt()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                for pid in self.pids():
                    os.kill(pid, signal.SIGKILL)
                raise
        # Every process that Ctrl-C was to end: also those that outlived a broken shutdown.
        try:
            wait_until(lambda: not self.pids(), 30, "the end of every process")
        finally:
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._process.returncode

    def interrupt(self) -> None:
        """Ctrl-C, unless it was pressed before."""
        if not self._interrupted:
            self._interrupted = True
            self._process.send_signal(signal.SIGINT)

    def cluster_env(self) -> dict[str, str]:
        """An environment in which `ray.init(address="auto")` finds the server's cluster."""
        for pid in self.pids():
            for argument in (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0"):
                if argument.startswith(b"--gcs-address="):
                    address = argument.decode().partition("=")[2]
                    # Ray guards the clusters that it starts by a token, and looks for it only when told.
                    return {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
        raise AssertionError("the server runs no Ray node")

    def pids(self) -> list[int]:
        """Every live process that the server started, by the mark in its environment."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue  # it ended meanwhile, or is a zombie
        return found

    def post(self, body: dict[str, Any], timeout_s: float = 60) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/embeddings", json=body, timeout=timeout_s)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30)

    def counter(self, stage: str, name: str) -> int:
        """A counter of the stage's cache, or of the stage itself, summed over its live replicas."""
        replicas = self.stage(stage)
        return sum(replica[name] if name in replica else replica["cache"][name] for replica in replicas)

    def kill(self, *stages: str) -> None:
        """SIGKILL to every replica of the stages; returns when new ones serve in their place."""
        old = {replica["pid"] for stage in stages for replica in self.stage(stage)}
        for pid in old:
            os.kill(pid, signal.SIGKILL)

        def replaced() -> bool:
            if self.get("/health").status_code != 200:
                return False
            now = [[replica["pid"] for replica in self.stage(stage)] for stage in stages]
            return all(pids and not old & set(pids) for pids in now)

        wait_until(replaced, 90, f"new replicas of {', '.join(stages)}")

    def stage(self, name: str) -> list[dict[str, Any]]:
        """Counters of a stage's live replicas, from /info."""
        return self.get("/info").raise_for_status().json()["stages"][name]  # type: ignore[no-any-return]

    def serve_log_lines(self) -> Iterator[str]:
        """What Serve's processes have logged to files so far, without order."""
        for path in self._folder.glob("ray/session_*/logs/serve/*.log"):
            if not path.parents[2].is_symlink():
                yield from path.read_text().splitlines()

    def master_metric(self, name: str) -> float:
        """A counter of mooncake_master's own Prometheus page."""
        page = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10).text
        values = [line.split()[-1] for line in page.splitlines() if line.split(" ")[0].split("{")[0] == name]
        assert values, f"{name} is not on the master's page"
        return sum(map(float, values))

    def _healthy(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError(f"serve run exited with {self._process.returncode}")
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code == 200
        except httpx.TransportError:
            return False
