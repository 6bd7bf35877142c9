"""The stages through Ray Serve handles: retries when a replica dies, and errors of our own tree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from epd.deployments.errors import EPDError, Overloaded, StageUnavailable
from epd.deployments.messages import EmbedReply, EncodeReply, MediaMessage, RowsMessage, SequenceMessage

logger = logging.getLogger(__name__)

# A call whose replica died is made again, at most this often: both stages' calls are idempotent.
MAX_RETRIES = 2


async def call(handle: DeploymentHandle, method: str, *args: Any) -> Any:
    """One call of a stage. Raises StageUnavailable when its replicas keep dying, or the stage's own EPDError."""
    for retries_left in reversed(range(MAX_RETRIES + 1)):
        try:
            return await getattr(handle, method).remote(*args)
        except (RayActorError, ActorUnavailableError, DeploymentUnavailableError) as error:
            if not retries_left:
                raise StageUnavailable(f"{handle.deployment_name} has no replica that can answer") from error
            logger.warning("%s.%s is tried again: %s", handle.deployment_name, method, type(error).__name__)
        except BackPressureError as error:
            raise Overloaded(f"{handle.deployment_name}: {error.message}") from None
        except RayTaskError as error:
            if isinstance(error.cause, EPDError):
                raise error.cause from None
            raise
    raise AssertionError("the loop returns or raises")


class RayEncoderClient:
    """`EncoderClient` over a handle of the Encoder deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def encode(self, media: Sequence[MediaMessage]) -> EncodeReply:
        reply = await call(self._handle, "encode", list(media))
        assert isinstance(reply, EncodeReply)
        return reply


class RayEmbedderClient:
    """`EmbedderClient` over a handle of the Embedder deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def embed(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage], dimensions: int | None
    ) -> EmbedReply:
        reply = await call(self._handle, "embed", list(sequences), rows, dimensions)
        assert isinstance(reply, EmbedReply)
        return reply
