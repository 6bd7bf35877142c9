"""The builder: checks the settings, then wires the deployments into one application.

Without postponed annotations: Serve reads the type of `build`'s argument to parse the config file.

Use it from a Serve config file: `import_path: epd.deployments.app:build`.
"""

import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from epd.cache.kv.checks import check_kv
from epd.deployments.embedder import Embedder
from epd.deployments.encoder import Encoder
from epd.deployments.http import make_app
from epd.deployments.ingress import Ingress
from epd.deployments.mooncake import MooncakeStore
from epd.deployments.router import CONTENT_AFFINITY
from epd.deployments.settings import Settings
from epd.deployments.stage import open_model

# The shares of a CPU keep a whole application, and a second one during a rolling update, on two cores.
_LIGHT = {"num_cpus": 0.1}
_HEAVY = {"num_cpus": 0.3}


def build(args: Settings) -> Application:
    """The application for these settings. Raises ValueError naming the setting before anything starts.

    Every deployment's options can be overridden by name (Ingress, Encoder, Embedder, MooncakeStore)
    in the `deployments` list of a Serve config file.
    """
    settings = args.resolved(has_gpu=_cluster_has_gpu())
    model = open_model(settings.model)
    check_kv(settings.kv, model.checkpoint.settings, os.environ)
    stage = {**_HEAVY, "num_gpus": 1} if settings.model.device == "cuda" else _HEAVY
    store = None
    if settings.store.needs_server and model.takes_images:
        store = _deployment(MooncakeStore, _LIGHT).bind(settings.store)
    encoder = None
    if model.takes_images:
        encoder = _deployment(Encoder, stage, request_router_config=CONTENT_AFFINITY).bind(settings)
    embedder = _deployment(Embedder, stage).bind(settings)
    served = serve.ingress(make_app(_current_replica))(Ingress)
    return _deployment(served, _LIGHT, name="Ingress").bind(settings, embedder, encoder, store)


def _deployment(
    cls: type, actor_options: dict[str, Any], name: str | None = None, **options: Any
) -> serve.Deployment:
    return serve.deployment(
        cls, name=name or cls.__name__, ray_actor_options=actor_options, max_ongoing_requests=256, **options
    )


def _current_replica() -> Any:
    return serve.get_replica_context().servable_object


def _cluster_has_gpu() -> bool:
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
