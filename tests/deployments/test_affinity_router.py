"""The router as Serve drives it, with replicas made by hand and no cluster."""

from __future__ import annotations

import asyncio
import uuid
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own pydantic models
    from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
    from ray.serve.request_router import PendingRequest, ReplicaID

from epd.deployments.affinity import rank
from epd.deployments.errors import StageUnavailable
from epd.deployments.membership import live_replicas
from epd.deployments.router import ContentAffinityRouter


class FakeReplica:
    """What the router sees of a replica. num_ongoing: what it answers when asked for its load."""

    max_ongoing_requests = 100

    def __init__(self, name: str, deployment: DeploymentID, num_ongoing: int = 0) -> None:
        self.replica_id = ReplicaID(name, deployment_id=deployment)
        self.num_ongoing = num_ongoing

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_ongoing


class Cell:
    """A router over fake replicas r0, r1, ...; one answers with each of `loads`."""

    def __init__(self, loads: list[int], **kwargs: Any) -> None:
        self.deployment = DeploymentID(name="Encoder", app_name=uuid.uuid4().hex)
        self.replicas = [FakeReplica(f"r{i}", self.deployment, load) for i, load in enumerate(loads)]
        self.router = ContentAffinityRouter(
            deployment_id=self.deployment,
            handle_source=DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
        )
        self.router.initialize_state(**kwargs)
        self.router.update_replicas(self.replicas)
        for replica in self.replicas:
            self.router.on_new_queue_len_info(replica.replica_id, replica.num_ongoing)

    @property
    def names(self) -> list[str]:
        return [replica.replica_id.unique_id for replica in self.replicas]

    async def route(self, key: str, request_id: str = "one request") -> str:
        """The replica that a call would be sent to, as Serve asks for it."""
        return await self.send(self.pending(key, request_id))

    def pending(self, key: str, request_id: str = "one request") -> PendingRequest:
        metadata = RequestMetadata(
            request_id=request_id, internal_request_id=request_id, call_method="encode", session_id=key
        )
        return PendingRequest(args=[], kwargs={}, metadata=metadata)

    async def send(self, pending: PendingRequest, again: bool = False) -> str:
        """again: as Serve does when the replica has died, or refused, before it confirmed the call."""
        replica = await self.router._choose_replica_for_request(pending, is_retry=again)
        return str(replica.replica_id.unique_id)

    def kill(self, name: str) -> None:
        self.router.on_replica_actor_died(ReplicaID(name, deployment_id=self.deployment))

    def known(self) -> tuple[str, ...]:
        return live_replicas(self.deployment.app_name, self.deployment.name)


async def test_every_call_of_one_request_reaches_the_owner_of_its_own_key() -> None:
    """Sixteen concurrent calls made while serving one request all find their replicas.

    Ray's own bookkeeping would answer one of them and leave the rest waiting.
    """
    cell = Cell([0, 0, 0])
    keys = [f"key-{i}" for i in range(16)]
    async with asyncio.timeout(10):
        chosen = await asyncio.gather(*map(cell.route, keys))
    assert chosen == [rank(key, cell.names)[0] for key in keys]


async def test_a_cancelled_call_leaves_the_others_alone() -> None:
    """A call cancelled while it waits for a replica takes none of its siblings with it."""
    cell = Cell([0, 0])
    cell.router.update_replicas([])
    waiting = [asyncio.create_task(cell.route(f"key-{i}")) for i in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    cell.router.update_replicas(cell.replicas)
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[0], asyncio.CancelledError)
    assert outcomes[1:] == [rank(f"key-{i}", cell.names)[0] for i in range(1, 4)]


async def test_calls_without_a_key_go_to_the_least_loaded() -> None:
    """Health checks and the like need no owner."""
    assert await Cell([5, 2, 9]).route("") == "r1"


async def test_a_saturated_owner_is_passed_over() -> None:
    """Above the bound the next replica in the key's own order takes the call."""
    first, second = rank("key", ["r0", "r1"])
    cell = Cell([{first: 8, second: 0}[name] for name in ("r0", "r1")], min_load=4)
    assert await cell.route("key") == second


async def test_an_owner_that_takes_no_more_calls_is_passed_over() -> None:
    """Also when the bound alone would let it have the call."""
    first, second = rank("key", ["r0", "r1"])
    cell = Cell([{first: 100, second: 99}[name] for name in ("r0", "r1")], min_load=1000)
    assert await cell.route("key") == second


async def test_a_dead_replica_is_known_as_such_at_once() -> None:
    """Clients stop grouping for it before the controller has noticed."""
    cell = Cell([0, 0, 0])
    assert cell.known() == ("r0", "r1", "r2")
    cell.kill("r1")
    assert cell.known() == ("r0", "r2")


async def test_a_call_that_kills_before_it_is_confirmed_is_given_up() -> None:
    """Serve alone would send it to one replica after the other, for ever."""
    cell = Cell([0] * 8, max_lost_sends=2)
    pending = cell.pending("deadly")
    chosen = [await cell.send(pending)]
    for _ in range(2):
        cell.kill(chosen[-1])
        chosen.append(await cell.send(pending, again=True))
    assert chosen == rank("deadly", cell.names)[:3]
    cell.kill(chosen[-1])
    with pytest.raises(StageUnavailable, match="3 replicas died before they could take this call"):
        await cell.send(pending, again=True)


async def test_a_call_that_is_refused_goes_on_looking() -> None:
    """Living replicas that are full are no reason to give up."""
    cell = Cell([0, 0, 0], max_lost_sends=0)
    pending = cell.pending("key")
    chosen = [await cell.send(pending)]
    for _ in range(5):
        chosen.append(await cell.send(pending, again=True))
    assert chosen == [rank("key", cell.names)[0]] * 6


def test_a_deployment_never_heard_of_has_no_known_replicas() -> None:
    """Clients send one group then, and its router waits for a replica."""
    assert live_replicas("no such application", "Encoder") == ()


@pytest.mark.parametrize("kwargs", [{"load_factor": 1.0}, {"min_load": 0}])
async def test_a_bound_that_cannot_be_kept_is_refused(kwargs: dict[str, float]) -> None:
    """Both values are named."""
    with pytest.raises(ValueError, match="load_factor must be above 1 and min_load at least 1"):
        Cell([0], **kwargs)
