"""Hosts of a network of our own: network namespaces on one bridge, with pods that share nothing but files.

Nothing outside can be reached from them: the bridge is in a namespace as well, and has no way out.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from shlex import quote
from typing import TypeVar

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000
_SUBNET = "10.231.77"


def namespaces_work() -> bool:
    """Whether this process may make network namespaces and bridges."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    probe = f"epd{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "br0", "type", "bridge")
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run(["ip", "netns", "del", probe], stderr=subprocess.DEVNULL)
    return True


class Host:
    """One host. `address`: its own on the bridge. Threads of `threads` open their sockets here."""

    def __init__(self, name: str, namespace: str, hub: str, address: str, logs: Path) -> None:
        self.name = name
        self.address = address
        self._namespace = namespace
        self._hub = hub
        self._logs = logs
        self.threads = ThreadPoolExecutor(32, initializer=self._enter)

    def start(self, name: str, *command: str | Path, env: Mapping[str, str]) -> Pod:
        """A pod on this host that runs `command` as its first process."""
        return Pod(f"{self.name}-{name}", self._namespace, command, env, self._logs)

    def call(self, function: Callable[[], Result]) -> Result:
        """`function()` on a thread of this host."""
        return self.threads.submit(function).result()

    def cut(self) -> None:
        """Takes the cable out: packets are lost, and nobody is told."""
        _ip("-n", self._hub, "link", "set", self.name, "down")

    def mend(self) -> None:
        _ip("-n", self._hub, "link", "set", self.name, "up")

    def sent_bytes(self) -> int:
        """Bytes that this host has sent over its cable."""
        shown = _ip("-n", self._hub, "-s", "-j", "link", "show", self.name)
        received: int = json.loads(shown)[0]["stats64"]["rx"]["bytes"]  # what the hub received
        return received

    def processes(self) -> list[str]:
        """Titles of the processes that run here, up to the first dot or blank."""
        titles = []
        for pid in _ip("netns", "pids", self._namespace).split():
            try:
                title = (Path("/proc") / pid / "cmdline").read_text(errors="replace")
            except OSError:
                continue  # it ended meanwhile
            titles.append(re.split(r"[.\s\0]", title)[0])
        return titles

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path(f"/run/netns/{self._namespace}").open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")


class Process:
    """A command, and the file that its output goes to."""

    def __init__(self, log: Path, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd="/", env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> int:
        """Its exit status."""
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)


class Pod(Process):
    """A process and all that it starts. It has `/tmp` and `/dev/shm` of its own, as a pod has.

    `kill` ends them all at once: the first process dies with `unshare`, and with that one all others.
    """

    def __init__(
        self, name: str, namespace: str, command: Sequence[str | Path], env: Mapping[str, str], logs: Path
    ) -> None:
        self._logs = logs
        alone = ("--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        mounts = "; ".join([*_own_tmp(), "mount -t tmpfs none /dev/shm", 'exec "$@"'])
        entered = ["ip", "netns", "exec", namespace, "unshare", *alone, "sh", "-ec", mounts, "sh"]
        super().__init__(logs / f"{name}.log", [*entered, *command], env)

    def execute(self, name: str, *command: str | Path, env: Mapping[str, str]) -> Process:
        """One more process inside the pod. Dies with it."""
        entered = ["nsenter", "--target", self._first, "--mount", "--ipc", "--uts", "--net", "--pid"]
        return Process(self._logs / f"{name}.log", [*entered, *command], env)

    def write(self, name: str, text: str) -> Path:
        """A file in the pod's `/tmp`; returns its path as the pod sees it."""
        (Path("/proc") / self._first / "root/tmp" / name).write_text(text)
        return Path("/tmp") / name

    @property
    def _first(self) -> str:
        """The process id, outside, of the pod's first process."""
        pid = self._process.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return first


def _own_tmp() -> Iterator[str]:
    """Commands that give a pod a `/tmp` of its own; in it, should they lie there, our code and its Python."""
    code = (Path(__file__).resolve().parents[2], Path(sys.prefix), Path(sys.base_prefix))
    kept = sorted({str(path) for path in code if path.is_relative_to("/tmp")})
    if kept:
        yield "mount --rbind /tmp /mnt"
    yield "mount -t tmpfs none /tmp"
    for path in kept:
        seen = path.replace("/tmp", "/mnt", 1)
        yield f"mkdir -p {quote(path)}; mount --bind {quote(seen)} {quote(path)}"
    if kept:
        yield "umount --lazy /mnt"


@contextmanager
def network(names: Sequence[str], logs: Path) -> Iterator[dict[str, Host]]:
    """Hosts by name, at 10.231.77.1 and on. Ends with no namespace left; pods are the caller's to kill."""
    hub = f"epd{os.getpid()}-hub"
    with ExitStack() as undo:
        _namespace(hub, undo)
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "link", "set", "br0", "up")
        hosts = {}
        for number, name in enumerate(names, start=1):
            namespace = f"epd{os.getpid()}-{name}"
            _namespace(namespace, undo)
            address = f"{_SUBNET}.{number}"
            _ip("-n", hub, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("-n", hub, "link", "set", name, "master", "br0", "up")
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            host = Host(name, namespace, hub, address, logs)
            undo.callback(host.threads.shutdown, wait=True, cancel_futures=True)
            hosts[name] = host
        yield hosts


def _namespace(name: str, undo: ExitStack) -> None:
    _ip("netns", "add", name)
    undo.callback(_ip, "netns", "del", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
