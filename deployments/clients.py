"""The stages through Ray Serve handles: who gets which call, retries when a replica dies, our own errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatus, ReplicaState

from epd.deployments.affinity import group_by_owner
from epd.deployments.errors import EPDError, Overloaded, StageUnavailable
from epd.deployments.membership import live_replicas
from epd.deployments.messages import EmbedReply, EncodeReply, MediaMessage, RowsMessage, SequenceMessage

logger = logging.getLogger(__name__)

# What was in a call whose replica died is sent again, at most this often: the stages' calls are idempotent.
# An input that kills its replica is thus gone after one more death than this.
MAX_RETRIES = 2

# Longest that a question about a stage's state waits for an answer.
STATUS_TIMEOUT_S = 5.0


class ReplicaLost(Exception):
    """The replica, or the node that held its reply, died during the call."""


async def call_once(method: DeploymentHandle, *args: Any) -> Any:
    """One call of a handle's method. Raises ReplicaLost, Overloaded, StageUnavailable, or the stage's own
    EPDError. A caller that is cancelled takes the call with it.
    """
    name = method.deployment_name
    response = method.remote(*args)
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except BackPressureError as error:
        raise Overloaded(f"{name}: {error.message}") from None
    except DeploymentUnavailableError as error:
        raise StageUnavailable(f"{name} is not available") from error
    except RayTaskError as error:  # first: it may also be an instance of what the replica's code raised
        if isinstance(error.cause, EPDError):
            raise error.cause from None
        raise
    except (RayActorError, ObjectLostError) as error:
        raise ReplicaLost(f"{name}: {type(error).__name__}") from error


async def call(handle: DeploymentHandle, method: str, *args: Any) -> Any:
    """One call, made again when its replica dies. Raises what `call_once` does, but for ReplicaLost."""
    bound = getattr(handle, method)
    for retries_left in reversed(range(MAX_RETRIES + 1)):
        try:
            return await call_once(bound, *args)
        except ReplicaLost as error:
            _give_up_or_log(error, retries_left)
    raise AssertionError("the loop returns or raises")


async def ready(handle: DeploymentHandle, *, may_be_none: bool = False) -> bool:
    """Whether a stage does without its store. Raises StageUnavailable when it cannot serve.

    may_be_none: for a stage whose live replicas are known (see `membership`). One that autoscaling has left
    without any can serve, and is not woken by the question.
    """
    if may_be_none and await _is_scaled_to_zero(handle):
        return False
    return bool(await call(handle, "ready"))


async def every_stats(handle: DeploymentHandle) -> list[dict[str, Any]]:
    """What `stats` says in each live replica; those that do not answer are passed over."""
    try:
        replies = await handle.broadcast("stats").results_async(timeout_s=STATUS_TIMEOUT_S)
    except DeploymentUnavailableError:  # it has none
        return []
    return [reply for reply in replies if isinstance(reply, dict)]


async def _is_scaled_to_zero(handle: DeploymentHandle) -> bool:
    """Asks Serve's controller, but only when no replica is known."""
    if live_replicas(handle.app_name, handle.deployment_name):
        return False
    status = await asyncio.to_thread(serve.status)
    deployment = status.applications[handle.app_name].deployments[handle.deployment_name]
    is_well = deployment.status in (DeploymentStatus.HEALTHY, DeploymentStatus.DOWNSCALING)
    return is_well and deployment.replica_states.keys() <= {ReplicaState.STOPPING}


class RayEncoderClient:
    """`EncoderClient` over a handle of the Encoder deployment, whose router is `ContentAffinityRouter`.

    Each picture goes to the replica that owns its key, all of one owner's in one call.

    replicas: names of the live replicas; default: those that the handle's router knows.
    """

    def __init__(self, handle: DeploymentHandle, replicas: Callable[[], Sequence[str]] | None = None) -> None:
        self._method = handle.options(
            method_name="encode"
        )  # starts its router: the replicas come to be known
        self._replicas = replicas or partial(live_replicas, handle.app_name, handle.deployment_name)

    async def encode(self, media: Sequence[MediaMessage]) -> EncodeReply:
        """What became of each picture. Every group runs to its end before an error leaves.

        Raises Overloaded, or StageUnavailable for a picture whose calls died MAX_RETRIES + 1 times.
        """
        return await self._encode(media, MAX_RETRIES)

    async def _encode(self, media: Sequence[MediaMessage], retries_left: int) -> EncodeReply:
        groups = group_by_owner(media, self._replicas())
        replies = await asyncio.gather(
            *(self._encode_group(group, retries_left) for group in groups), return_exceptions=True
        )
        return _merge(replies)

    async def _encode_group(self, group: list[MediaMessage], retries_left: int) -> EncodeReply:
        """One call; when its replica dies, its pictures are shared out anew among those that are left."""
        try:
            reply = await call_once(self._method.options(session_id=group[0].key), group)
        except ReplicaLost as error:
            _give_up_or_log(error, retries_left)
            return await self._encode(group, retries_left - 1)
        assert isinstance(reply, EncodeReply)
        return reply


class RayEmbedderClient:
    """`EmbedderClient` over a handle of the Embedder deployment, under Serve's own router."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def embed(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage], dimensions: int | None
    ) -> EmbedReply:
        """Raises Overloaded, or StageUnavailable when the call's replicas died MAX_RETRIES + 1 times."""
        reply = await call(self._handle, "embed", list(sequences), rows, dimensions)
        assert isinstance(reply, EmbedReply)
        return reply


def _give_up_or_log(error: ReplicaLost, retries_left: int) -> None:
    if not retries_left:
        raise StageUnavailable(
            f"{error}, the last of {MAX_RETRIES + 1} replicas lost to this call"
        ) from error
    logger.warning("%s: tried again on another replica, at most %d times", error, retries_left)


def _merge(replies: Sequence[EncodeReply | BaseException]) -> EncodeReply:
    merged = EncodeReply()
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
        steps = merged.timings.keys() | reply.timings.keys()
        merged = EncodeReply(
            merged.published + reply.published,
            merged.direct | reply.direct,
            merged.failed | reply.failed,
            {step: max(merged.timings.get(step, 0.0), reply.timings.get(step, 0.0)) for step in steps},
        )
    return merged
