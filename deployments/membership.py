"""Which replicas a deployment has, as this process's routers know it.

Serve makes the routers itself and hands them to nobody, so a table is the one way from a router to the
clients beside it. It is a module of its own because Serve pickles the router's module by value: a table there
would be another one in every process.
"""

from __future__ import annotations

from collections.abc import Iterable

# Written by the routers alone. Each value is replaced, never changed, so that any thread may read.
_live: dict[tuple[str, str], tuple[str, ...]] = {}


def live_replicas(app_name: str, deployment_name: str) -> tuple[str, ...]:
    """Names of the deployment's replicas; empty before a handle of it was used, or its `options` called."""
    return _live.get((app_name, deployment_name), ())


def publish_replicas(app_name: str, deployment_name: str, names: Iterable[str]) -> None:
    """For routers: what `live_replicas` says from now on."""
    _live[app_name, deployment_name] = tuple(sorted(names))
