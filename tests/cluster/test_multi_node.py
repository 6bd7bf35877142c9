"""configs/cluster.yaml on three hosts of a network: head and Mooncake's master, encoders, embedders and rows.

What this cannot show: real cables and clocks (the hosts share one machine's CPUs and kernel), RDMA, GPUs, and
what Kubernetes adds: scheduling, network policies, probes, KubeRay's autoscaler, restarts of pods.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import yaml

from epd.cache.stores.mooncake_library import master_path
from epd.deployments.settings import LimitSettings
from tests.cluster.hosts import Host, Pod, Process, namespaces_work, network
from tests.cluster.server import ROOT, wait_until
from tests.models.pictures import png
from tests.oracle import Oracle, assert_same

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(not namespaces_work(), reason="needs root and network namespaces"),
    pytest.mark.timeout(900),
]

RPC_PORT = 50051
REPLICA = "ray::ServeReplica:epd:"
RESOURCES = {"encoder": {"epd_encoder": 1}, "embedder": {"epd_embedder": 1, "epd_ingress": 1}}
# Named, as in k8s/.
AGENT_PORTS = (
    "--metrics-export-port=8080",
    "--dashboard-agent-listen-port=52365",
    "--dashboard-agent-grpc-port=52366",
    "--runtime-env-agent-port=52367",
)
REQUEST_TIMEOUT_S = 20.0
# Serve's own deadline, for an Ingress that is cut off itself; and what a busy machine needs to say so.
PROXY_TIMEOUT_S = 25.0
ANSWER_S = 45.0
SEEN = 77  # the picture that is asked for again and again
RAY = Path(sys.executable).with_name("ray")
SERVE = Path(sys.executable).with_name("serve")

Vector = npt.NDArray[np.float32]


@dataclass
class Cluster:
    """The running application, and the hosts under it."""

    hosts: dict[str, Host]
    folder: Path
    pods: dict[str, Pod] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    watch: Process | None = None
    serve: Process | None = None

    @property
    def url(self) -> str:
        return f"http://{self.hosts['head'].address}:8000"

    def start(self) -> None:
        head = self.hosts["head"]
        token = uuid.uuid4().hex
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            # As KubeRay does: one token for all nodes.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_worker_niceness": "0",
            # A node that is silent for 12 to 20 s is dead; one that starts on a busy machine is not.
            "RAY_raylet_start_wait_time_s": "60",
            "RAY_health_check_period_ms": "3000",
            "RAY_health_check_timeout_ms": "5000",
            "RAY_health_check_initial_delay_ms": "5000",
            "RAY_health_check_failure_threshold": "4",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "HOME": "/tmp",
        }
        self.pods["master"] = head.start(
            "master",
            master_path(),
            *(f"--rpc_address={head.address}", f"--rpc_port={RPC_PORT}", f"--metrics_host={head.address}"),
            env=self.env,
        )
        self.start_node("head")
        self.await_node("head", lambda: "Ray runtime started" in self.pods["head"].log.read_text())
        self.watch = self.pods["head"].execute(
            "watch",
            *(sys.executable, ROOT / "tests/cluster/watch_nodes.py", f"{head.address}:6379"),
            env=self.env,
        )
        wait_until(lambda: len(self.nodes()) == 1, 120, "the first node")
        for name in RESOURCES:
            self.start_node(name)
        # Rows lie on the host that reads them.
        self.pods["segment"] = self.hosts["embedder"].start(
            "segment",
            *(sys.executable, "-m", "epd.cache.stores.segment_owner", "--segment-bytes", str(256 << 20)),
            *("--master", f"{head.address}:{RPC_PORT}", "--host", self.hosts["embedder"].address),
            env=self.env,
        )
        for name in RESOURCES:
            self.await_node(name)
        self.serve = self.pods["head"].execute(
            "serve",
            *(SERVE, "run", "--address", f"{head.address}:6379", self.config()),
            env=self.env,
        )
        wait_until(self.is_healthy, 300, "the application's start")

    def stop(self) -> None:
        for pod in self.pods.values():
            pod.kill()
        for process in (self.watch, self.serve):
            if process is not None:
                process.kill()

    def start_node(self, name: str) -> None:
        host = self.hosts[name]
        if name == "head":
            role = ["--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"]
        else:
            role = [f"--address={self.hosts['head'].address}:6379", "--num-cpus=1"]
            role += ["--resources", json.dumps(RESOURCES[name])]
        self.pods[name] = host.start(
            "ray",
            *(RAY, "start", "--block", f"--node-ip-address={host.address}"),
            *(*role, "--object-store-memory=100000000", *AGENT_PORTS),
            env=self.env,
        )

    def await_node(self, name: str, is_there: Callable[[], bool] | None = None) -> None:
        """Blocks until the node runs. Does what the kubelet does: a raylet gives up when its agents have not
        started within seconds, which happens on a busy machine; its pod is started again.
        """

        def is_running() -> bool:
            if is_there() if is_there else self.hosts[name].address in self.nodes():
                return True
            if self.pods[name].has_ended:
                self.start_node(name)
            return False

        wait_until(is_running, 240, f"the node {name}")

    def nodes(self) -> list[str]:
        """Addresses of the live nodes, as Ray's head counts them; none while it does not say."""
        assert self.watch is not None
        lines = self.watch.log.read_text().splitlines()
        last = next((line for line in reversed(lines) if line.startswith('["')), "[]")
        return json.loads(last)  # type: ignore[no-any-return]

    def config(self) -> Path:
        """configs/cluster.yaml, but for this network's addresses and small shares of a CPU."""
        document = yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())
        (application,) = document["applications"]
        store = application["args"]["store"]
        assert store["address"] == f"epd-mooncake:{RPC_PORT}"
        store |= {"address": f"{self.hosts['head'].address}:{RPC_PORT}", "timeout_s": 2}
        assert document["http_options"]["request_timeout_s"] > LimitSettings().request_timeout_s
        document["http_options"]["request_timeout_s"] = PROXY_TIMEOUT_S
        application["args"]["limits"] = {"request_timeout_s": REQUEST_TIMEOUT_S}
        for deployment in application["deployments"]:
            deployment["ray_actor_options"]["num_cpus"] = 0.1
        return self.pods["head"].write("cluster.yaml", yaml.safe_dump(document))

    def is_healthy(self) -> bool:
        try:
            return self.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def get(self, path: str) -> httpx.Response:
        return self.hosts["head"].call(lambda: httpx.get(f"{self.url}{path}", timeout=30))

    def embed(self, picture: bytes) -> Vector:
        answer = self.hosts["head"].call(lambda: self.post(picture))
        assert answer.status_code == 200, answer.text
        return vector_of(answer)

    def post(self, picture: bytes) -> httpx.Response:
        """To be called on a thread of a host."""
        item = {"image": base64.b64encode(picture).decode()}
        body = {"input": [item], "encoding_format": "base64"}
        return httpx.post(f"{self.url}/v1/embeddings", json=body, timeout=ANSWER_S)

    def counter(self, stage: str, name: str) -> int:
        replicas = self.get("/info").raise_for_status().json()["stages"][stage]
        return sum(one[name] if name in one else one["cache"][name] for one in replicas)


def vector_of(answer: httpx.Response) -> Vector:
    return np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), "<f4")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hosts")
    with network(["head", "encoder", "embedder"], folder) as hosts, ExitStack() as undo:
        cluster = Cluster(hosts, folder)
        undo.callback(cluster.stop)
        try:
            cluster.start()
        except BaseException:
            for log in folder.glob("*.log"):
                print(f"== {log.name}\n{log.read_text(errors='replace')[-4000:]}")
            raise
        yield cluster


@pytest.fixture(scope="module")
def oracle(demo_folder: Path) -> Oracle:
    return Oracle(demo_folder)


def test_rows_cross_the_network(cluster: Cluster, oracle: Oracle) -> None:
    """Each stage is on its own host; a picture's rows go from one to the other, and its vector is true."""
    hosts = cluster.hosts
    running = {name: {line for line in host.processes() if REPLICA in line} for name, host in hosts.items()}
    assert running == {
        "head": set(),
        "encoder": {f"{REPLICA}Encoder"},
        "embedder": {f"{REPLICA}Embedder", f"{REPLICA}Ingress"},
    }
    picture = png(220, 200, seed=1)
    sent = hosts["encoder"].sent_bytes()
    put = cluster.counter("encoder", "put_bytes")
    first = cluster.embed(picture)
    assert_same(first, oracle.embed({"parts": [picture]}))
    row_bytes = cluster.counter("encoder", "put_bytes") - put
    assert row_bytes > 10_000
    assert hosts["encoder"].sent_bytes() - sent > row_bytes
    assert cluster.counter("embedder", "hits_store") == 1
    assert np.array_equal(first, cluster.embed(picture))
    assert cluster.counter("encoder", "encodes") == 1


@dataclass
class Asked:
    """One request of the load, and how it ended."""

    seed: int
    at: float
    took_s: float
    status: int
    vector: Vector | None


@dataclass
class Lane:
    """A client that asks again and again, always for the picture `seed`, or each time for a new one."""

    cluster: Cluster
    number: int
    seed: int | None
    asked: list[Asked] = field(default_factory=list)

    def run(self, stop: Event) -> None:
        """Until told to stop, for at most a few minutes. To be called on a thread of a host."""
        started = time.monotonic()
        while not stop.is_set() and time.monotonic() - started < 400:
            seed = self.seed or 1000 * self.number + len(self.asked)
            at = time.monotonic()
            answer = self.cluster.post(png(64, 64, seed))
            took_s = time.monotonic() - at
            vector = vector_of(answer) if answer.status_code == 200 else None
            self.asked.append(Asked(seed, at, took_s, answer.status_code, vector))
            stop.wait(0.1)


def more_answers(lanes: list[Lane], count: int = 3) -> None:
    """Blocks until every lane has so many more answers."""
    before = [len(lane.asked) for lane in lanes]

    def enough() -> bool:
        return all(len(lane.asked) >= n + count for lane, n in zip(lanes, before, strict=True))

    wait_until(enough, 120, f"{count} more answers in every lane")


def keeps_working(cluster: Cluster) -> None:
    """Blocks until pictures that nobody has seen are embedded again."""

    def works() -> bool:
        picture = png(64, 64, seed=uuid.uuid4().int % 2**32)
        try:
            return cluster.hosts["head"].call(lambda: cluster.post(picture)).status_code == 200
        except httpx.TransportError:
            return False

    wait_until(works, 120, "an answer for a new picture")


@pytest.mark.parametrize("victim", ["encoder", "embedder"])
def test_a_host_is_cut_off_and_comes_back(cluster: Cluster, oracle: Oracle, victim: str) -> None:
    """Under load a host loses its cable, is given up by Ray, and comes back as a new pod: every request is
    answered within its deadline, no answer is wrong, and new pictures are embedded again."""
    host = cluster.hosts[victim]
    cluster.embed(png(64, 64, SEEN))
    lanes = [Lane(cluster, 1, SEEN), Lane(cluster, 2, None), Lane(cluster, 3, None)]
    stop = Event()
    ends = [cluster.hosts["head"].threads.submit(lane.run, stop) for lane in lanes]
    try:
        more_answers(lanes)
        host.cut()
        cut_at = time.monotonic()
        wait_until(lambda: host.address not in cluster.nodes(), 120, "Ray's notice that the node is gone")
        host.mend()
        # What the kubelet does: a node that was given up must not go on.
        cluster.pods[victim].kill()
        cluster.start_node(victim)
        cluster.await_node(victim)
        keeps_working(cluster)
        wait_until(cluster.is_healthy, 60, "health")
        mended_at = time.monotonic()
        more_answers(lanes)
    finally:
        stop.set()
        for end in ends:
            end.result(timeout=ANSWER_S + 60)
    report(victim, lanes, cut_at, mended_at)

    asked = [one for lane in lanes for one in lane.asked]
    assert max(one.took_s for one in asked) < ANSWER_S
    assert {one.status for one in asked} <= {200, 408, 429, 500, 503, 504}
    whole = [one for one in asked if one.at + one.took_s < cut_at or one.at > mended_at]
    assert all(one.status == 200 for one in whole)
    for one in asked:
        if one.vector is not None:
            assert_same(one.vector, oracle.embed({"parts": [png(64, 64, one.seed)]}))
    if victim == "encoder":  # pictures that were seen need none
        assert all(one.status == 200 for one in lanes[0].asked)


def report(victim: str, lanes: list[Lane], cut_at: float, mended_at: float) -> None:
    """Shown with `pytest -rP`."""
    for name, begin, end in (
        ("before", 0.0, cut_at),
        ("away", cut_at, mended_at),
        ("after", mended_at, 1e18),
    ):
        for kind, chosen in (("seen", lanes[:1]), ("new", lanes[1:])):
            part = [one for lane in chosen for one in lane.asked if begin <= one.at < end]
            counts = dict(Counter(one.status for one in part))
            slowest = max((one.took_s for one in part), default=0.0)
            print(
                f"{victim} {name}: {len(part)} {kind} pictures, by status {counts}, slowest {slowest:.1f} s"
            )


def test_a_pod_that_ends_hands_its_replicas_over(cluster: Cluster) -> None:
    """What a pod runs before it ends drains its node: Serve stops the replica there. Comes last."""
    host = cluster.hosts["encoder"]
    env = cluster.env | {"RAY_ADDRESS": f"{cluster.hosts['head'].address}:6379"}
    env["PATH"] = f"{RAY.parent}:{env['PATH']}"
    drain = cluster.pods["encoder"].execute("drain", ROOT / "scripts/drain-node", "60", env=env)
    assert drain.wait(120) == 0
    assert not [title for title in host.processes() if title.startswith(REPLICA)]
