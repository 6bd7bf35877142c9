"""The manifests as kustomize builds them, and what tests ask of them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu-demo", "gpu", "gpu-rdma", "ha")

Document = dict[str, Any]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds the manifests")


@dataclass(frozen=True)
class Pods:
    """A kind of pod: what a workload makes."""

    name: str
    labels: Mapping[str, str]
    spec: Document

    @property
    def containers(self) -> list[Document]:
        return list(self.spec["containers"])

    @property
    def main(self) -> Document:
        return self.containers[0]

    @property
    def all_containers(self) -> list[Document]:
        return [*self.spec.get("initContainers", ()), *self.containers]

    def ports(self) -> dict[str, int]:
        """Numbers of the containers' ports, by name."""
        return {
            port["name"]: port["containerPort"] for one in self.containers for port in one.get("ports", ())
        }

    def environment(self) -> dict[str, str]:
        """Of the main container, as far as it is written down."""
        return {entry["name"]: entry["value"] for entry in self.main.get("env", ()) if "value" in entry}

    def volume(self, name: str) -> Document:
        return next(volume for volume in self.spec["volumes"] if volume["name"] == name)


@functools.cache
def build(overlay: str) -> tuple[Document, ...]:
    """All documents of an overlay, or of `base`."""
    folder = ROOT / "k8s" / ("base" if overlay == "base" else f"overlays/{overlay}")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, kind: str) -> list[Document]:
    return [document for document in build(overlay) if document["kind"] == kind]


def by_name(overlay: str, kind: str, name: str) -> Document:
    (found,) = (document for document in of_kind(overlay, kind) if document["metadata"]["name"] == name)
    return found


def ray_cluster(overlay: str) -> Document:
    (service,) = of_kind(overlay, "RayService")
    return service["spec"]["rayClusterConfig"]  # type: ignore[no-any-return]


def serve_config(overlay: str) -> Document:
    """The Serve configuration inside the RayService."""
    (service,) = of_kind(overlay, "RayService")
    return yaml.safe_load(service["spec"]["serveConfigV2"])  # type: ignore[no-any-return]


def arguments(overlay: str) -> Document:
    (application,) = serve_config(overlay)["applications"]
    return application["args"]  # type: ignore[no-any-return]


def deployments(overlay: str) -> dict[str, Document]:
    (application,) = serve_config(overlay)["applications"]
    return {deployment["name"]: deployment for deployment in application["deployments"]}


def groups(overlay: str) -> dict[str, Document]:
    """The worker groups, by name."""
    return {group["groupName"]: group for group in ray_cluster(overlay)["workerGroupSpecs"]}


def offered(group: Document) -> dict[str, float]:
    """Custom resources of one pod of a worker group. A shell reads the string: hence the quotes."""
    quoted = group["rayStartParams"]["resources"]
    assert quoted[0] == quoted[-1] == '"', quoted
    return json.loads(quoted[1:-1].replace('\\"', '"'))  # type: ignore[no-any-return]


def pods(overlay: str) -> dict[str, Pods]:
    """Every kind of pod that the overlay makes, by its component."""
    found = [_pods(name, template) for name, template in _templates(overlay)]
    return {one.labels["app.kubernetes.io/component"]: one for one in found}


def _templates(overlay: str) -> Iterator[tuple[str, Document]]:
    for document in build(overlay):
        if document["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]
    cluster = ray_cluster(overlay)
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def _pods(name: str, template: Document) -> Pods:
    return Pods(name, template["metadata"]["labels"], template["spec"])


def selects(selector: Document, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes a pod with these labels."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions", ()):
        assert term["operator"] == "In", term
        if labels.get(term["key"]) not in term["values"]:
            return False
    return True


_UNITS = {"": 1, "m": 1e-3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str | int) -> float:
    """A Kubernetes quantity as a number: of cores, or of bytes."""
    digits = str(text).rstrip("KMGTim")
    return float(digits) * _UNITS[str(text)[len(digits) :]]
