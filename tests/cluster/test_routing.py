"""Content affinity in a real cluster: real handles and replicas, with a stand-in for the vision tower."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own pydantic models
    import ray
    from ray import cloudpickle, serve
    from ray.serve.handle import DeploymentHandle

from epd.deployments.affinity import rank
from epd.deployments.clients import MAX_RETRIES, RayEncoderClient
from epd.deployments.errors import Overloaded, RequestError, StageUnavailable
from epd.deployments.membership import live_replicas
from epd.deployments.messages import EncodeReply, MediaMessage
from epd.deployments.router import content_affinity

ROOT = Path(__file__).resolve().parents[2]
NUM_REPLICAS = 3

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.asyncio(loop_scope="module"),
    # Ray's own: sockets and log files that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class FakeEncoder:
    """Publishes the pictures it is given, and counts. What a key starts with says how it is encoded.

    "gated": waits until `open_gate`. "deadly": kills this process, and leaves a file in `folder`.
    "full": raises Overloaded. "wrong": raises RequestError. Equal keys join, as in the encoder's cache.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._gate = asyncio.Event()
        self._running: dict[str, asyncio.Future[None]] = {}
        self._encodes: Counter[str] = Counter()
        self._calls: list[list[str]] = []
        self._cancelled: list[list[str]] = []

    async def encode(self, media: Sequence[MediaMessage]) -> EncodeReply:
        self._calls.append([message.key for message in media])
        try:
            await asyncio.gather(*(self._encode_one(message.key) for message in media))
        except asyncio.CancelledError:
            self._cancelled.append([message.key for message in media])
            raise
        return EncodeReply(published=tuple(message.key for message in media))

    async def _encode_one(self, key: str) -> None:
        if key not in self._running:
            self._running[key] = asyncio.ensure_future(self._run(key))
        await asyncio.shield(self._running[key])

    async def _run(self, key: str) -> None:
        self._encodes[key] += 1
        if key.startswith("gated"):
            await self._gate.wait()
        elif key.startswith("deadly"):
            (self._folder / f"{key}-{os.getpid()}").touch()
            # A while after the call was confirmed: what dies earlier, Serve sends on by itself.
            asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGKILL)
            await self._gate.wait()
        elif key.startswith("full"):
            raise Overloaded("the queue is full")
        elif key.startswith("wrong"):
            raise RequestError("is no picture", "input[0].image")

    async def open_gate(self) -> None:
        self._gate.set()

    async def close_gate(self) -> None:
        self._gate.clear()

    async def stats(self) -> dict[str, Any]:
        context = serve.get_replica_context()
        return {
            "replica": context.replica_id.unique_id,
            "pid": os.getpid(),
            "encodes": dict(self._encodes),
            "calls": self._calls,
            "cancelled": self._cancelled,
        }


class FakeIngress:
    """Encodes several requests' pictures while serving one request of its own."""

    def __init__(self, encoder: DeploymentHandle) -> None:
        self._client = RayEncoderClient(encoder)

    async def encode(self, requests: list[list[str]]) -> list[EncodeReply]:
        return await asyncio.gather(*(self._client.encode(media(*keys)) for keys in requests))


class ScaleAsTold:
    """Autoscaling policy: as many replicas as the file `path` says."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def __call__(self, _context: Any) -> tuple[int, dict[str, Any]]:
        return int(self._path.read_text()), {}


class Stage:
    """The deployed stand-ins, and what a test asks of them."""

    def __init__(self, application: str, folder: Path) -> None:
        self.application = application
        self.folder = folder
        self.client = RayEncoderClient(serve.get_deployment_handle("FakeEncoder", application))
        # Has a router of its own, so that questions do not count as load.
        self.control = serve.get_deployment_handle("FakeEncoder", application)

    async def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of the replicas, by name."""
        return {stats["replica"]: stats for stats in await self.broadcast("stats")}

    async def broadcast(self, method: str) -> list[Any]:
        results: list[Any] = await self.control.broadcast(method).results_async(timeout_s=30)
        return results

    async def encoded(self, *keys: str) -> Counter[str]:
        """How often each of these keys was encoded, on any replica."""
        stats = (await self.stats()).values()
        return Counter({key: sum(one["encodes"].get(key, 0) for one in stats) for key in keys})

    async def replicas_that_encoded(self, key: str) -> list[str]:
        return [name for name, one in (await self.stats()).items() if one["encodes"].get(key)]

    def live(self) -> tuple[str, ...]:
        return live_replicas(self.application, "FakeEncoder")

    def num_running(self) -> int:
        deployments = serve.status().applications[self.application].deployments
        return int(deployments["FakeEncoder"].replica_states.get("RUNNING", 0))

    async def settle(self, num_replicas: int) -> None:
        """Waits until so many replicas run and this process's router knows just these."""
        await until(lambda: self.num_running() == num_replicas == len(self.live()), "the replicas")


async def until(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
    """Asks again until the condition, or what it awaits to, is true: the cluster has no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not await _value(condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        await asyncio.sleep(0.05)


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def media(*keys: str) -> list[MediaMessage]:
    return [MediaMessage(key, (1, 2, 2), key.encode()) for key in keys]


def deploy(application: str, folder: Path, **encoder_options: Any) -> Stage:
    light = {"ray_actor_options": {"num_cpus": 0.1}, "max_ongoing_requests": 256}
    options = {
        "num_replicas": NUM_REPLICAS,
        "request_router_config": content_affinity(),
        "health_check_period_s": 1,
        **light,
        **encoder_options,
    }
    encoder_class = serve.deployment(FakeEncoder, **options)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker can import this module
    encoder = encoder_class.bind(str(folder))
    serve.run(serve.deployment(FakeIngress, **light).bind(encoder), name=application, route_prefix=None)
    return Stage(application, folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """One Ray for the module. A folder that every replica can write to."""
    folder = Path(tempfile.mkdtemp(prefix="epd-"))  # short: Ray puts sockets below it
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder),
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}},
    )
    try:
        serve.start(proxy_location="Disabled")
        yield folder
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def deployed(cluster: Path) -> Stage:
    return deploy("routing", cluster)


@pytest_asyncio.fixture(loop_scope="module")
async def stage(deployed: Stage) -> Stage:
    """The stage with all its replicas alive and the gate shut."""
    await deployed.settle(NUM_REPLICAS)
    await deployed.broadcast("close_gate")
    return deployed


async def test_equal_keys_of_different_clients_are_encoded_once(stage: Stage) -> None:
    """Twenty callers with handles of their own, and an ingress, join one running encode."""
    clients = [RayEncoderClient(serve.get_deployment_handle("FakeEncoder", "routing")) for _ in range(20)]
    calls = [asyncio.create_task(client.encode(media("gated-joined"))) for client in clients]
    ingress = serve.get_app_handle("routing")
    other_process = asyncio.create_task(_one(ingress.encode.remote([["gated-joined"]])))

    async def all_arrived() -> bool:
        stats = (await stage.stats()).values()
        arrived = [call for one in stats for call in one["calls"] if call == ["gated-joined"]]
        return len(arrived) == len(calls) + 1

    await until(all_arrived, "all calls at a replica")
    await stage.broadcast("open_gate")
    replies = [*await asyncio.gather(*calls), *await other_process]
    assert {reply.published for reply in replies} == {("gated-joined",)}
    assert await stage.encoded("gated-joined") == {"gated-joined": 1}


async def test_fifty_two_item_calls_inside_one_request_all_return(stage: Stage) -> None:
    """Concurrent calls made while serving one request: each gets its own answer, each key its owner.

    Hangs under a router that tells calls apart by the parent's request id, as Ray's own does.
    """
    requests = [[f"fan-{i}-a", f"fan-{i}-b"] for i in range(50)]
    async with asyncio.timeout(60):
        replies = await serve.get_app_handle("routing").encode.remote(requests)
    assert [sorted(reply.published) for reply in replies] == requests
    assert await _misplaced(stage, "fan") == []


async def test_fifty_two_item_calls_of_fifty_requests_all_return(stage: Stage) -> None:
    """The same with a parent request for each."""
    requests = [[f"own-{i}-a", f"own-{i}-b"] for i in range(50)]
    ingress = serve.get_app_handle("routing")
    async with asyncio.timeout(60):
        replies = await asyncio.gather(*(_one(ingress.encode.remote([keys])) for keys in requests))
    assert [sorted(reply[0].published) for reply in replies] == requests
    assert await _misplaced(stage, "own") == []


async def test_a_request_makes_one_call_to_each_owner(stage: Stage) -> None:
    """However many pictures it has."""
    keys = [f"many-{i}" for i in range(60)]
    await stage.client.encode(media(*keys))
    calls = {
        name: [call for call in one["calls"] if call[0].startswith("many")]
        for name, one in (await stage.stats()).items()
    }
    assert [len(made) for made in calls.values()] == [1] * NUM_REPLICAS
    assert sorted(key for made in calls.values() for call in made for key in call) == sorted(keys)


async def test_a_replica_killed_amid_a_call_is_replaced_by_another(stage: Stage) -> None:
    """kill -9 while it encodes: the caller gets its answer from a living one, and others are left alone."""
    keys = [f"gated-killed-{i}" for i in range(12)]
    call = asyncio.create_task(stage.client.encode(media(*keys)))
    await until(lambda: _all_encoding(stage, keys), "all pictures being encoded")
    victim, *_ = (await stage.stats()).values()
    os.kill(victim["pid"], signal.SIGKILL)
    await until(lambda: victim["replica"] not in stage.live(), "the death being noticed")
    await until(lambda: _all_encoding(stage, keys), "the lost pictures being encoded elsewhere")
    await stage.broadcast("open_gate")
    assert sorted((await call).published) == sorted(keys)
    assert set((await stage.encoded(*keys)).values()) == {1}


async def test_a_passed_deadline_reaches_the_replicas(stage: Stage) -> None:
    """The calls of a caller that gives up are cancelled where they run, and nobody else's."""
    keys = [f"gated-late-{i}" for i in range(12)]
    patient = asyncio.create_task(stage.client.encode(media(*keys)))
    late = asyncio.create_task(stage.client.encode(media(*keys)))

    async def num(of: str) -> int:
        calls = [call for one in (await stage.stats()).values() for call in one[of]]
        return sum(set(call) <= set(keys) for call in calls)

    async def all_arrived() -> bool:
        return await num("calls") == 2 * NUM_REPLICAS

    async def cancelled() -> bool:
        return await num("cancelled") == NUM_REPLICAS

    await until(all_arrived, "both callers' calls")
    late.cancel()
    await until(cancelled, "the late caller's calls being cancelled")
    await stage.broadcast("open_gate")
    assert sorted((await patient).published) == sorted(keys)
    with pytest.raises(asyncio.CancelledError):
        await late


async def test_a_deadly_picture_is_given_up_and_takes_no_other_with_it(stage: Stage) -> None:
    """It kills MAX_RETRIES + 1 replicas and no more; the request's other groups are encoded."""
    owner = rank("deadly", stage.live())[0]
    others = [key for key in map("bystander-{}".format, range(100)) if rank(key, stage.live())[0] != owner]
    with pytest.raises(StageUnavailable):
        await stage.client.encode(media("deadly", *others[:20]))
    assert len(list(stage.folder.glob("deadly-*"))) == MAX_RETRIES + 1


async def test_errors_of_the_stage_arrive_as_themselves(stage: Stage) -> None:
    """With type, message and param."""
    with pytest.raises(Overloaded, match="the queue is full"):
        await stage.client.encode(media("full"))
    with pytest.raises(RequestError) as caught:
        await stage.client.encode(media("wrong"))
    assert caught.value.param == "input[0].image"


async def test_a_saturated_owner_hands_on_to_the_next(cluster: Path) -> None:
    """Calls for one owner's keys spill over to the others, and come back to it when it is free again."""
    stage = deploy("bounded", cluster, request_router_config=content_affinity(min_load=4))
    await stage.settle(NUM_REPLICAS)
    first, *_ = stage.live()
    keys = [key for key in map("gated-{}".format, range(1000)) if rank(key, stage.live())[0] == first]
    calls = []
    for key in keys[:24]:  # one after the other: a router learns of a load when a replica answers a call
        calls.append(asyncio.create_task(stage.client.encode(media(key))))
        await until(partial(_all_encoding, stage, [key]), f"{key} at a replica")
    loads = {name: len(one["calls"]) for name, one in (await stage.stats()).items()}
    # The bound at the end is 13 calls (1.5 times the mean). What a router knows of loads is a little late.
    assert 4 <= loads[first] <= 16
    assert min(loads.values()) > 0
    await stage.broadcast("open_gate")
    await asyncio.gather(*calls)
    spare = iter(keys[24:])

    async def owned_again() -> bool:
        key = next(spare)
        await stage.client.encode(media(key))
        return await stage.replicas_that_encoded(key) == [first]

    await until(owned_again, "the router learning that the owner is free")
    serve.delete("bounded")


async def test_scaling_fails_no_request_and_moves_only_its_share(cluster: Path) -> None:
    """1 -> 3 -> 1 replicas under calls: every call succeeds, and a third of the keys never moves."""
    told = cluster / "num_replicas"
    told.write_text("1")
    policy = {"policy_function": ScaleAsTold, "policy_kwargs": {"path": str(told)}}
    scaling = {"min_replicas": 1, "max_replicas": 3, "upscale_delay_s": 0, "downscale_delay_s": 0}
    stage = deploy("scaling", cluster, num_replicas="auto", autoscaling_config={**scaling, "policy": policy})
    await stage.settle(1)
    keys = [f"scaled-{i}" for i in range(300)]
    stop = asyncio.Event()

    async def keep_calling(worker: int) -> int:
        num_calls = 0
        while not stop.is_set():
            wanted = [f"load-{worker}-{num_calls}-{i}" for i in range(4)]
            reply = await stage.client.encode(media(*wanted))
            assert sorted(reply.published) == sorted(wanted)
            num_calls += 1
        return num_calls

    load = [asyncio.create_task(keep_calling(worker)) for worker in range(4)]
    owners: list[dict[str, str]] = []
    for num_replicas in (1, 3, 1):
        told.write_text(str(num_replicas))
        await stage.settle(num_replicas)
        owners.append({key: rank(key, stage.live())[0] for key in keys})
        await stage.client.encode(media(*(f"step-{len(owners)}-{i}" for i in range(60))))
        assert await _misplaced(stage, f"step-{len(owners)}") == []
    stop.set()
    assert min(await asyncio.gather(*load)) > 0
    moved = sum(owners[0][key] != owners[1][key] for key in keys) / len(keys)
    assert moved == pytest.approx(2 / 3, abs=0.1)
    serve.delete("scaling")


async def _one(response: Any) -> Any:
    return await response


async def _all_encoding(stage: Stage, keys: Sequence[str]) -> bool:
    return all((await stage.encoded(*keys)).values())


async def _misplaced(stage: Stage, prefix: str) -> list[str]:
    """Keys `prefix-...` that a replica encoded which does not own them."""
    return [
        key
        for name, one in (await stage.stats()).items()
        for key in one["encodes"]
        if key.startswith(f"{prefix}-") and rank(key, stage.live())[0] != name
    ]
