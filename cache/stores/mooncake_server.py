"""Mooncake's master and the owner of the storage segment, started and kept alive together."""

from __future__ import annotations

import json
import socket
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

from epd.cache.errors import StoreUnavailable
from epd.cache.stores.mooncake_library import master_path, missing_library
from epd.cache.stores.supervised import Child, Output, SupervisedProcess

_HEALTH_TIMEOUT_S = 1.0
_HEALTH_INTERVAL_S = 0.02  # while the master starts
_PUT_TIMEOUT_S = 5  # for as long a key is blocked when its writer dies in the middle of a put
_LOADER_ERROR = "error while loading shared libraries"


class MooncakeServer:
    """`mooncake_master`, and a process that owns a segment of `segment_bytes`, under supervision.

    Both are children of this process and die with it. A master that dies comes back on the same port,
    empty; clients and the segment's owner reattach by themselves. The master listens on `host`;
    clients and owner listen on all addresses: fence them by network policy.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        rpc_port: int = 0,
        metrics_port: int = 0,
        segment_bytes: int = 1 << 30,
        *,
        protocol: str = "tcp",
        device: str = "",
        lease_ms: int = 10_000,
        client_ttl_s: int = 10,
    ) -> None:
        """host: address under which other hosts reach this one. Ports: 0 picks a free one.

        protocol: tcp or rdma. device: RDMA devices, comma-separated. lease_ms: for how long an object that
        was asked for is safe from eviction. client_ttl_s: after how long a dead owner's segment is forgotten.
        Raises StoreUnavailable when Mooncake is not installed.
        """
        self.host = host
        self.rpc_port = rpc_port or free_port(host)
        self.metrics_port = metrics_port or free_port(host)
        self._health_url = f"http://{host}:{self.metrics_port}/health"
        self.master = SupervisedProcess(
            "mooncake_master",
            [
                str(master_path()),
                f"--rpc_address={host}",
                f"--rpc_port={self.rpc_port}",
                f"--metrics_host={host}",
                f"--metrics_port={self.metrics_port}",
                f"--default_kv_lease_ttl={lease_ms}",
                f"--client_ttl={client_ttl_s}",
                f"--put_start_discard_timeout_sec={_PUT_TIMEOUT_S}",
                f"--put_start_release_timeout_sec={2 * _PUT_TIMEOUT_S}",
                "--enable_metric_reporting=false",
                "--logtostderr=true",
                "--minloglevel=1",
            ],
            self._await_master,
        )
        self.owner = SupervisedProcess(
            "mooncake segment owner",
            [
                *(sys.executable, "-P", "-m", "epd.cache.stores.segment_owner"),
                *("--master", self.address, "--host", host, "--segment-bytes", str(segment_bytes)),
                *("--protocol", protocol, "--device", device),
            ],
            _await_owner,
        )

    @property
    def address(self) -> str:
        """`host:port` for MooncakeStore."""
        return f"{self.host}:{self.rpc_port}"

    @property
    def num_restarts(self) -> int:
        return self.master.num_restarts + self.owner.num_restarts

    def start(self) -> None:
        """Returns once objects can be stored. Raises StoreUnavailable, saying why, when that fails."""
        for port in (self.rpc_port, self.metrics_port):
            check_free(self.host, port)
        try:
            self.master.start()
            self.owner.start()
        except StoreUnavailable as error:
            self.stop()
            if _LOADER_ERROR in str(error):
                raise StoreUnavailable(missing_library(str(error))) from error
            raise

    def stop(self) -> None:
        """Ends both processes and waits for them. May be called twice."""
        self.owner.stop()
        self.master.stop()

    def check(self) -> None:
        """Raises StoreUnavailable when objects cannot be stored now."""
        for process, name in ((self.master, "master"), (self.owner, "segment owner")):
            if process.pid is None:
                raise StoreUnavailable(f"Mooncake's {name} is down")
        if not self._is_serving():
            raise StoreUnavailable(f"Mooncake's master at {self.address} does not answer")

    def _is_serving(self) -> bool:
        try:
            with urlopen(self._health_url, timeout=_HEALTH_TIMEOUT_S) as answer:
                return bool(json.load(answer).get("service_ready"))
        except (URLError, OSError, ValueError):
            return False

    def _await_master(self, child: Child, output: Output) -> None:
        while not self._is_serving():
            if child.poll() is not None:
                raise StoreUnavailable(f"it exited; is port {self.rpc_port} or {self.metrics_port} in use?")
            time.sleep(_HEALTH_INTERVAL_S)


def _await_owner(child: Child, output: Output) -> None:
    if not output.wait_for("ready"):
        raise StoreUnavailable("it exited")


def check_free(host: str, port: int) -> None:
    """Raises StoreUnavailable when somebody listens there; the master itself seems ready before it fails."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StoreUnavailable(f"port {port} of {host} is in use: {error.strerror}") from error


def free_port(host: str) -> int:
    """A TCP port of `host` that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
