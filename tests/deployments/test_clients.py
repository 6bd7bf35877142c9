"""Retries, grouping and errors of the stages' clients, over handles made by hand."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own pydantic models
    from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError, RayTaskError
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from epd.deployments.affinity import rank
from epd.deployments.clients import MAX_RETRIES, RayEmbedderClient, RayEncoderClient, call
from epd.deployments.errors import EPDError, Overloaded, RequestError, StageUnavailable
from epd.deployments.messages import EmbedReply, EncodeReply, MediaMessage, RowsMessage

Behaviour = Callable[..., Awaitable[Any]]


class FakeResponse:
    """A running call; counts how often it was cancelled."""

    def __init__(self, answer: Awaitable[Any]) -> None:
        self._answer = answer
        self.num_cancels = 0

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer.__await__()

    def cancel(self) -> None:
        self.num_cancels += 1


class FakeHandle:
    """A deployment's handle. behaviour: what a replica does with a call's routing key and arguments."""

    app_name = "app"
    deployment_name = "Encoder"

    def __init__(self, behaviour: Behaviour, session_id: str = "", root: FakeHandle | None = None) -> None:
        self._behaviour = behaviour
        self._session_id = session_id
        self._root = root or self
        self.responses: list[FakeResponse] = []

    def options(self, *, method_name: str = "", session_id: str = "") -> FakeHandle:
        return FakeHandle(self._behaviour, session_id, self._root)

    def __getattr__(self, name: str) -> FakeHandle:
        return self.options(method_name=name)

    def remote(self, *args: Any) -> FakeResponse:
        response = FakeResponse(self._behaviour(self._session_id, *args))
        self._root.responses.append(response)
        return response


class FakeEncoders:
    """Replicas by name that publish what they are given. deadly: keys that kill their replica."""

    def __init__(self, names: list[str], deadly: set[str] | None = None) -> None:
        self.live = list(names)
        self.deadly = deadly or set()
        self.calls: list[tuple[str, list[str]]] = []

    async def __call__(self, session_id: str, media: list[MediaMessage]) -> EncodeReply:
        replica = rank(session_id, self.live)[0]
        keys = [message.key for message in media]
        self.calls.append((replica, keys))
        await asyncio.sleep(0)
        if self.deadly & set(keys):
            self.live.remove(replica)
            raise ActorDiedError
        return EncodeReply(published=tuple(keys))

    def client(self) -> RayEncoderClient:
        return RayEncoderClient(FakeHandle(self), lambda: tuple(self.live))


def media(*keys: str) -> list[MediaMessage]:
    return [MediaMessage(key, (1, 2, 2), b"") for key in keys]


def raising(*errors: BaseException) -> Behaviour:
    """Raises the errors one call after the other, then answers "done"."""
    left = list(errors)

    async def behave(*_args: Any) -> str:
        if left:
            raise left.pop(0)
        return "done"

    return behave


def keys_of(replica: str, names: list[str], count: int) -> list[str]:
    """Keys that the replica owns among these."""
    return [key for key in map("key-{}".format, range(1000)) if rank(key, names)[0] == replica][:count]


async def test_one_call_for_each_owner() -> None:
    """Forty pictures on three replicas make three calls, each with what its replica owns."""
    encoders = FakeEncoders(["r0", "r1", "r2"])
    wanted = [f"key-{i}" for i in range(40)]
    reply = await encoders.client().encode(media(*wanted))
    assert sorted(reply.published) == sorted(wanted)
    assert sorted(replica for replica, _ in encoders.calls) == ["r0", "r1", "r2"]
    for replica, keys in encoders.calls:
        assert {rank(key, encoders.live)[0] for key in keys} == {replica}


async def test_no_known_replica_makes_one_call() -> None:
    """The router waits for the first replica, which takes all."""
    encoders = FakeEncoders(["r0"])
    await RayEncoderClient(FakeHandle(encoders), lambda: ()).encode(media("a", "b", "c"))
    assert encoders.calls == [("r0", ["a", "b", "c"])]


async def test_nothing_to_encode_makes_no_call() -> None:
    """An empty request is answered at once."""
    encoders = FakeEncoders(["r0"])
    assert await encoders.client().encode([]) == EncodeReply()
    assert encoders.calls == []


async def test_replies_are_merged_whole() -> None:
    """Published, direct and failed pictures of every group reach the caller."""
    row = RowsMessage((1, 2, 2), np.zeros((1, 4), np.uint8))

    async def behave(_session: str, group: list[MediaMessage]) -> EncodeReply:
        (key,) = [message.key for message in group]
        return {
            "published": EncodeReply(published=(key,)),
            "direct": EncodeReply(direct={key: row}),
            "failed": EncodeReply(failed={key: "broken"}),
        }[key]

    # One replica for each key: named by it, so that it owns nothing else.
    names = [f"r{i}" for i in range(64)]
    client = RayEncoderClient(FakeHandle(behave), lambda: names)
    reply = await client.encode(media("published", "direct", "failed"))
    assert reply == EncodeReply(("published",), {"direct": row}, {"failed": "broken"})


async def test_pictures_of_a_dead_replica_are_shared_out_among_the_living() -> None:
    """The retry goes by who owns the pictures now."""
    encoders = FakeEncoders(["r0", "r1", "r2"])
    lost = keys_of("r0", encoders.live, 30)

    async def behave(session_id: str, group: list[MediaMessage]) -> EncodeReply:
        if "r0" in encoders.live:
            encoders.live.remove("r0")
            raise ActorDiedError
        return await encoders(session_id, group)

    client = RayEncoderClient(FakeHandle(behave), lambda: tuple(encoders.live))
    reply = await client.encode(media(*lost))
    assert sorted(reply.published) == sorted(lost)
    assert sorted(replica for replica, _ in encoders.calls) == ["r1", "r2"]


async def test_a_deadly_picture_ends_in_stage_unavailable() -> None:
    """It is sent at most MAX_RETRIES + 1 times."""
    encoders = FakeEncoders([f"r{i}" for i in range(8)], deadly={"poison"})
    with pytest.raises(StageUnavailable, match="the last of 3 replicas"):
        await encoders.client().encode(media("poison"))
    assert len(encoders.calls) == MAX_RETRIES + 1


async def test_a_deadly_picture_takes_no_other_group_with_it() -> None:
    """The other groups of the request run to their ends before the error leaves."""
    names = ["r0", "r1", "r2", "r3", "r4"]
    poison = keys_of("r0", names, 1)[0]
    others = [f"other-{i}" for i in range(200)]
    bystanders = [key for key in others if rank(key, names)[0] != "r0"]
    encoders = FakeEncoders(names, deadly={poison})
    with pytest.raises(StageUnavailable):
        await encoders.client().encode(media(poison, *bystanders))
    deaths = [keys for _, keys in encoders.calls if poison in keys]
    done = {key for _, keys in encoders.calls if poison not in keys for key in keys}
    assert len(deaths) == MAX_RETRIES + 1
    assert done == set(bystanders)


async def test_an_overloaded_group_is_not_sent_again() -> None:
    """Retries are for deaths: a full queue is the caller's to wait for."""
    handle = FakeHandle(raising(_from_replica(Overloaded("full"))))
    with pytest.raises(Overloaded, match="full"):
        await RayEncoderClient(handle, lambda: ["r0"]).encode(media("a"))
    assert len(handle.responses) == 1


async def test_cancelling_the_caller_cancels_its_calls() -> None:
    """A deadline that passes reaches every replica that works on the request."""
    started = asyncio.Semaphore(0)

    async def behave(*_args: Any) -> None:
        started.release()
        await asyncio.Event().wait()

    handle = FakeHandle(behave)
    client = RayEncoderClient(handle, lambda: ["r0", "r1", "r2"])
    task = asyncio.create_task(client.encode(media(*(f"key-{i}" for i in range(40)))))
    for _ in range(3):
        await started.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [response.num_cancels for response in handle.responses] == [1, 1, 1]


async def test_an_embed_call_survives_a_death() -> None:
    """The embedder's calls are retried whole."""
    reply = EmbedReply(np.zeros((0, 4), np.float32), ())
    errors = [ActorDiedError()]

    async def behave(_session: str, *args: Any) -> EmbedReply:
        assert args == ([], {}, None)
        if errors:
            raise errors.pop()
        return reply

    assert await RayEmbedderClient(FakeHandle(behave)).embed([], {}, None) is reply


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ActorUnavailableError("gone", b"0" * 16),
        ObjectLostError("00", None, ""),
    ],
)
async def test_every_kind_of_loss_is_retried(error: BaseException) -> None:
    """A dead replica, an unreachable one, and a reply lost with its node."""
    assert await call(FakeHandle(raising(*[error] * MAX_RETRIES)), "ready") == "done"


async def test_losses_end_in_stage_unavailable() -> None:
    """After MAX_RETRIES the caller gets a 503."""
    handle = FakeHandle(raising(*[ActorDiedError()] * (MAX_RETRIES + 1)))
    with pytest.raises(StageUnavailable, match="Encoder: ActorDiedError, the last of 3 replicas"):
        await call(handle, "ready")


async def test_the_stage_s_own_error_arrives_as_itself() -> None:
    """With its type, message and param, and nothing of Ray around it."""
    error = RequestError("too large", "input[3].image")
    with pytest.raises(RequestError) as caught:
        await call(FakeHandle(raising(_from_replica(error))), "ready")
    assert type(caught.value) is RequestError
    assert str(caught.value) == "input[3].image: too large"


async def test_a_fault_of_the_stage_is_not_hidden() -> None:
    """What is no EPDError stays what Ray made of it, with the replica's traceback."""
    handle = FakeHandle(raising(_from_replica(ZeroDivisionError("bug"))))
    with pytest.raises(ZeroDivisionError) as caught:
        await call(handle, "ready")
    assert isinstance(caught.value, RayTaskError)
    assert len(handle.responses) == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BackPressureError(num_queued_requests=8, max_queued_requests=8), Overloaded),
        (DeploymentUnavailableError(DeploymentID(name="Encoder", app_name="app")), StageUnavailable),
    ],
)
async def test_serve_s_refusals_become_our_errors(error: Exception, expected: type[EPDError]) -> None:
    """At once: neither gets better by asking again."""
    handle = FakeHandle(raising(error))
    with pytest.raises(expected):
        await call(handle, "ready")
    assert len(handle.responses) == 1


def _from_replica(error: Exception) -> BaseException:
    """The error as Ray raises it in the caller when a replica's code raised it."""
    wrapped = RayTaskError("encode", "Traceback ...", error).as_instanceof_cause()
    assert isinstance(wrapped, type(error))
    return wrapped
