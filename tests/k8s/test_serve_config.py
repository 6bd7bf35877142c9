"""The Serve configuration inside the RayService, as Ray and EPD read it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from epd.deployments.app import build as build_application
from epd.deployments.settings import Settings
from tests.k8s.manifests import OVERLAYS, ROOT, arguments, deployments, needs_kubectl, serve_config

CLUSTER = yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())


@needs_kubectl
@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_ray_takes_it(overlay: str) -> None:
    """Ray's own model of a Serve configuration accepts it."""
    schema = ServeDeploySchema.model_validate(serve_config(overlay))
    assert [application.name for application in schema.applications] == ["epd"]


@needs_kubectl
@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_it_builds_the_application(overlay: str, demo_folder: Path) -> None:
    """Its arguments are the builder's settings, and the application has the deployments that it names."""
    given = arguments(overlay)
    here = {"path": str(demo_folder), "device": "cpu", "dtype": "float32"}  # no hub, no GPU
    application = build_application(Settings.model_validate(given | {"model": given["model"] | here}))
    assert names(application) == set(deployments(overlay))


def names(application: Any) -> set[str]:
    """The deployments that an application is wired from."""
    bound = application._bound_deployment
    inner = (one for one in bound.init_args if hasattr(one, "_bound_deployment"))
    return {bound.name}.union(*map(names, inner))


@needs_kubectl
def test_the_base_has_the_values_of_the_cluster_configuration() -> None:
    """What the base serves is configs/cluster.yaml and, besides, API keys."""
    config = serve_config("base")
    auth = config["applications"][0]["args"].pop("auth")
    assert config == CLUSTER
    assert auth == {"keys_file": "/etc/epd/keys/api-keys"}


def test_the_cluster_configuration_is_valid() -> None:
    """`serve deploy configs/cluster.yaml` is taken by Ray and by the builder's settings."""
    ServeDeploySchema.model_validate(CLUSTER)
    settings = Settings.model_validate(CLUSTER["applications"][0]["args"])
    assert not settings.store.managed
    assert settings.store.client_host == "auto"


def test_both_stages_scale() -> None:
    """Encoder and Embedder have bounds and a policy that can be imported; encoders may go to none."""
    by_name = {one["name"]: one for one in CLUSTER["applications"][0]["deployments"]}
    for name in ("Encoder", "Embedder"):
        scaling = by_name[name]["autoscaling_config"]
        assert scaling["min_replicas"] < scaling["max_replicas"]
        module, _, function = scaling["policy"]["policy_function"].partition(":")
        policy = getattr(importlib.import_module(module), function)
        assert callable(policy(**scaling["policy"]["policy_kwargs"]))
    assert by_name["Encoder"]["autoscaling_config"]["min_replicas"] == 0
    assert by_name["Embedder"]["autoscaling_config"]["min_replicas"] > 0


def test_several_masters_are_found_through_etcd() -> None:
    """The store's address is a master's, or that of the etcd through which several choose a leader."""
    etcd = "etcd://one:2379;two:2379"
    assert Settings.model_validate({"store": {"managed": False, "address": etcd}}).store.address == etcd
    for store in ({"address": etcd}, {"managed": False, "address": "one:1;two:2"}):
        with pytest.raises(ValueError, match=r"store\.address"):
            Settings.model_validate({"store": store})
