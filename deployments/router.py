"""Content affinity inside Serve: a call goes to the replica that owns its key.

Serve makes one router for each handle, in the handle's own process. The caller names the key of a call
with `handle.options(session_id=key)`; a call without one goes to the least loaded replica. Wire it up with
`content_affinity()` as the deployment's `request_router_config`. Serve pickles this module by value: it must
hold no state.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from epd.deployments.affinity import order_within_bound
from epd.deployments.errors import StageUnavailable
from epd.deployments.membership import publish_replicas


class ContentAffinityRouter(RequestRouter):  # type: ignore[misc]
    """Tries the owner of the call's key, then the next replicas in that key's order.

    Replicas with more calls in flight than the bound (see `affinity.load_bound`) are tried last; one that
    refuses a call (`max_ongoing_requests`) or has died is passed over by Serve.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pending_by_call: dict[int, PendingRequest] = {}
        super().__init__(*args, **kwargs)

    def initialize_state(
        self, *, load_factor: float = 1.5, min_load: int = 64, max_lost_sends: int = 2
    ) -> None:
        """Takes `request_router_kwargs`. Raises ValueError when a bound could never be kept.

        max_lost_sends: how often a call is sent on when its replica dies before it confirms that it took
        the call. Serve would do that without end; here the caller gets StageUnavailable after these.
        """
        if load_factor <= 1 or min_load < 1:
            raise ValueError(
                f"load_factor must be above 1 and min_load at least 1, got {load_factor} and {min_load}"
            )
        self._load_factor = load_factor
        self._min_load = min_load
        self._max_lost_sends = max_lost_sends

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates, each a rank of its own, in the order to try them."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it Serve asks again at once, for ever, while every replica refuses.
        pending_request.routing_context.should_backoff = True
        if not pending_request.metadata.session_id:
            return [candidate_replicas]
        names = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        order = order_within_bound(
            pending_request.metadata.session_id,
            {name: self._load(replica.replica_id) for name, replica in names.items()},
            load_factor=self._load_factor,
            min_load=self._min_load,
        )
        return [[names[name]] for name in order]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        names = [replica_id.unique_id for replica_id in self.curr_replicas]
        publish_replicas(self._deployment_id.app_name, self._deployment_id.name, names)

    def _load(self, replica_id: ReplicaID) -> int:
        """Calls in flight on a replica, of all callers, as it last said; 0 when that is too long ago."""
        return self.replica_queue_len_cache.get(replica_id) or 0

    # Ray 2.60 finds the call that a chosen replica is for by `internal_request_id`, which all calls made
    # while serving one request share: of several at a time only the first is ever sent, the others hang.
    # Each call has its own metadata object, so that is what identifies it here. The methods are private
    # to Ray: its minor version is pinned, and tests/cluster/test_routing.py hangs without them.

    def _add_pending_request_to_indices(self, pending_request: PendingRequest) -> None:
        """Serve's: the call waits for a replica, for the first time or once more."""
        sent_to = getattr(pending_request, "sent_to", ())
        num_lost = sum(replica_id not in self.curr_replicas for replica_id in sent_to)
        if num_lost <= self._max_lost_sends:
            self._pending_by_call[id(pending_request.metadata)] = pending_request
            return
        name = self._deployment_id.name
        error = StageUnavailable(f"{name}: {num_lost} replicas died before they could take this call")
        pending_request.future.set_exception(error)

    def _remove_pending_request_from_indices(self, pending_request: PendingRequest) -> None:
        """Serve's: the call has a replica, or was cancelled."""
        self._pending_by_call.pop(id(pending_request.metadata), None)
        future = pending_request.future
        if future.done() and not future.cancelled():
            pending_request.sent_to = (*getattr(pending_request, "sent_to", ()), future.result().replica_id)

    def _get_pending_request_matching_internal_request_id(
        self, request_metadata: Any = None
    ) -> PendingRequest | None:
        """Serve's: the call that a replica was chosen for, unless it has gone."""
        pending = self._pending_by_call.get(id(request_metadata))
        return None if pending is None or pending.future.done() else pending


def content_affinity(**kwargs: float) -> RequestRouterConfig:
    """The `request_router_config` of a deployment whose calls go to the owners of their keys.

    kwargs: those of `ContentAffinityRouter.initialize_state`.
    """
    path = f"{ContentAffinityRouter.__module__}.{ContentAffinityRouter.__name__}"
    return RequestRouterConfig(request_router_class=path, request_router_kwargs=kwargs)


CONTENT_AFFINITY = content_affinity()
