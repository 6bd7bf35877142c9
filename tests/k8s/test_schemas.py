"""The manifests build, and are what Kubernetes and KubeRay take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from tests.k8s.manifests import OVERLAYS, ROOT, build, needs_kubectl, of_kind, pods

pytestmark = needs_kubectl

_CUSTOM = {"RayService", "PodMonitor"}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the fast one, if it is there


@pytest.mark.parametrize("version", ["1.29", "1.34"])
@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_kubernetes_own_kinds_keep_to_their_schemas(overlay: str, version: str) -> None:
    """Every field of every object is known to Kubernetes, and of its type."""
    checked = [document for document in build(overlay) if document["kind"] not in _CUSTOM]
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)
    assert len(checked) > 10


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ray_pods_keep_to_the_pod_schema(overlay: str) -> None:
    """The pod templates inside the RayService are pods that Kubernetes would take."""
    for name in ("head", "encoder", "embedder"):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": pods(overlay)[name].spec,
        }
        kubernetes_validate.validate(pod, "1.34", strict=True)


@pytest.fixture(scope="module")
def ray_service() -> jsonschema.Draft202012Validator:
    """Checks a RayService against KubeRay's definition, and refuses what that does not know."""
    path = os.environ.get("EPD_RAYSERVICE_CRD")
    if path is None:
        pytest.skip("EPD_RAYSERVICE_CRD names no RayService CRD")
    definition = yaml.load(Path(path).read_text(), _Loader)
    (version,) = (one for one in definition["spec"]["versions"] if one["name"] == "v1")
    return jsonschema.Draft202012Validator(_closed(version["schema"]["openAPIV3Schema"]))


@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_the_ray_service_keeps_to_its_definition(
    overlay: str, ray_service: jsonschema.Draft202012Validator
) -> None:
    """The RayService has no field that KubeRay's definition does not have, and lacks none that it wants."""
    (service,) = of_kind(overlay, "RayService")
    assert [error.message for error in ray_service.iter_errors(service)] == []


def test_an_unknown_field_of_a_ray_service_is_found(ray_service: jsonschema.Draft202012Validator) -> None:
    """The check above sees a misspelt field, also deep inside."""
    (service,) = of_kind("base", "RayService")
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    (error,) = ray_service.iter_errors(_with(service, group | {"minReplica": 1}))
    assert "minReplica" in error.message


@pytest.mark.parametrize("overlay", ["base", "gpu"])
def test_pod_monitors_name_what_to_scrape(overlay: str) -> None:
    """A PodMonitor has a selector and at least one named port."""
    monitors = of_kind(overlay, "PodMonitor")
    assert monitors
    for monitor in monitors:
        assert monitor["spec"]["selector"]["matchLabels"]
        assert all(endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"])


def test_the_serve_configurations_are_up_to_date() -> None:
    """The inlined Serve configurations are what configs/cluster.yaml and the values.yaml files make."""
    done = subprocess.run([sys.executable, ROOT / "k8s/render.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _with(service: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    cluster = service["spec"]["rayClusterConfig"]
    changed = cluster | {"workerGroupSpecs": [group, *cluster["workerGroupSpecs"][1:]]}
    return service | {"spec": service["spec"] | {"rayClusterConfig": changed}}


def _closed(schema: Any) -> Any:
    """The schema as JSON Schema that refuses unknown fields, as strict validation does."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: _closed(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    is_open = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if is_object and not is_open and schema["properties"].keys() - {"apiVersion", "kind", "metadata"}:
        metadata: dict[str, Any] = {name: {} for name in ("apiVersion", "kind", "metadata")}
        closed["properties"] = metadata | closed["properties"]
        closed["additionalProperties"] = False
    return closed
