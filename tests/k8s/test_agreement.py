"""Names, ports and sizes that several manifests, the Dockerfile and the settings speak of are the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve.schema import ServeDeploySchema

import epd
from epd.deployments.settings import Settings
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    Document,
    Pods,
    arguments,
    build,
    by_name,
    deployments,
    groups,
    needs_kubectl,
    of_kind,
    offered,
    pods,
    quantity,
    ray_cluster,
    selects,
    serve_config,
)

pytestmark = [needs_kubectl, pytest.mark.parametrize("overlay", OVERLAYS)]

GROUP_OF = {"Encoder": "encoder", "Embedder": "embedder", "Ingress": "embedder"}
SELECTORS = ("podSelector", "labelSelector", "selector")
OUTSIDE = {"kuberay-operator", "prometheus"}


def walk(value: Any) -> Iterator[Document]:
    """Every mapping inside `value`."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def test_images_are_those_that_the_dockerfile_builds(overlay: str) -> None:
    """Every image has a plain name and a version: this package's, or a well-known one."""
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "Dockerfile").read_text(), re.M))
    assert {"epd", "etcd"} <= targets
    for one in pods(overlay).values():
        for container in one.all_containers:
            name, _, tag = container["image"].partition(":")
            assert name in {"epd", "epd-etcd", "redis"}
            if name != "redis":
                assert tag.partition("-")[0] == epd.__version__
    stages = {pods(overlay)[name].main["image"] for name in ("head", "encoder", "embedder")}
    assert len(stages) == 1, "Ray wants one image, so that pickles fit"


def test_ray_versions_agree(overlay: str) -> None:
    """KubeRay is told the version of Ray that is installed."""
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert ray_cluster(overlay)["rayVersion"] == pinned[1]


def test_every_selector_finds_pods(overlay: str) -> None:
    """Services, budgets, policies, monitors and affinities select pods that exist."""
    labels = [one.labels for one in pods(overlay).values()]
    selectors: list[Document] = []
    for document in build(overlay):
        spec = document.get("spec", {})
        if document["kind"] == "Service":
            selectors.append({"matchLabels": spec["selector"]})
        for mapping in walk(spec):
            selectors += [mapping[key] for key in SELECTORS if is_selector(mapping, key)]
    assert len(selectors) > 10
    for selector in selectors:
        if selector.get("matchLabels", {}).get("app.kubernetes.io/name") not in OUTSIDE:
            assert any(selects(selector, one) for one in labels), selector


def chosen(overlay: str, selector: Document) -> list[Pods]:
    return [one for one in pods(overlay).values() if selects(selector, one.labels)]


def is_selector(mapping: Document, key: str) -> bool:
    value = mapping.get(key)
    return isinstance(value, dict) and ("matchLabels" in value or "matchExpressions" in value)


def test_workloads_select_their_own_pods(overlay: str) -> None:
    """A Deployment's or StatefulSet's selector takes its template's pods and no other kind."""
    for kind in ("Deployment", "StatefulSet"):
        for workload in of_kind(overlay, kind):
            taken = [one.name for one in chosen(overlay, workload["spec"]["selector"])]
            assert taken == [workload["metadata"]["name"]]


def test_ports_have_the_names_that_are_asked_for(overlay: str) -> None:
    """Services, monitors and probes name ports that their pods have."""
    for one in pods(overlay).values():
        for container in one.containers:
            names = {port["name"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for how in ("httpGet", "tcpSocket"):
                    if port := container.get(probe, {}).get(how, {}).get("port"):
                        assert port in names, (one.name, probe, port)
    for document in of_kind(overlay, "Service"):
        served = chosen(overlay, {"matchLabels": document["spec"]["selector"]})
        for port in document["spec"].get("ports", ()):
            assert all(one.ports()[port["targetPort"]] == port["port"] for one in served)
    for document in of_kind(overlay, "PodMonitor"):
        scraped = chosen(overlay, document["spec"]["selector"])
        for endpoint in document["spec"]["podMetricsEndpoints"]:
            assert all(endpoint["port"] in one.ports() for one in scraped)


def test_ray_listens_where_the_probes_ask(overlay: str) -> None:
    """The ports that Ray is started with are those of the pods."""
    starts = {"head": ray_cluster(overlay)["headGroupSpec"], **groups(overlay)}
    for name, start in starts.items():
        ports, params = pods(overlay)[name].ports(), start["rayStartParams"]
        assert int(params["metrics-export-port"]) == ports["metrics"]
        if name != "head":
            assert int(params["dashboard-agent-listen-port"]) == ports["agent"]


def test_http_has_one_port(overlay: str) -> None:
    """Serve listens where the Service, the probes and the network policy expect it."""
    (service,) = of_kind(overlay, "RayService")
    (port,) = service["spec"]["serveService"]["spec"]["ports"]
    policy = by_name(overlay, "NetworkPolicy", "epd-http")["spec"]
    assert port["name"] == "serve"  # KubeRay looks for this name
    ports = {
        serve_config(overlay)["http_options"]["port"],
        port["targetPort"],
        *(pods(overlay)[name].ports()["serve"] for name in ("head", "encoder", "embedder")),
        *(opened["port"] for opened in policy["ingress"][0]["ports"]),
    }
    assert len(ports) == 1


def test_the_store_is_where_its_clients_look(overlay: str) -> None:
    """Replicas and segments name the same masters, by a Service and port that exist, and one protocol."""
    store = Settings.model_validate(arguments(overlay)).store
    segment = pods(overlay)["store-segment"].environment()
    assert (segment["MASTER"], segment["PROTOCOL"], segment["DEVICE"]) == (
        store.address,
        store.protocol,
        store.device,
    )
    args = pods(overlay)["store-master"].main["args"]
    ports = pods(overlay)["store-master"].ports()
    assert f"--rpc_port={ports['rpc']}" in args
    assert f"--metrics_port={ports['metrics']}" in args
    if not store.address.startswith("etcd://"):
        service = by_name(overlay, "Service", store.host)
        assert store.port in [port["port"] for port in service["spec"]["ports"]]
        return
    endpoints = store.address.removeprefix("etcd://")
    assert f"--etcd_endpoints={endpoints}" in args
    assert "--rpc_address=$(POD_IP)" in args
    etcd = by_name(overlay, "StatefulSet", "epd-etcd")["spec"]
    port = pods(overlay)["etcd"].ports()["client"]
    members = [f"epd-etcd-{i}.{etcd['serviceName']}:{port}" for i in range(etcd["replicas"])]
    assert endpoints.split(";") == members


def test_each_deployment_lands_on_its_group(overlay: str) -> None:
    """Its resource is offered by one worker group, whose pods have room for it, and enough of them."""
    for name, options in deployments(overlay).items():
        actor = options["ray_actor_options"]
        (resource,) = actor["resources"]
        (group,) = (group for group in groups(overlay).values() if resource in offered(group))
        assert group["groupName"] == GROUP_OF[name]
        per_pod = offered(group)[resource] / actor["resources"][resource]
        scaling = options["autoscaling_config"]
        assert group["maxReplicas"] * per_pod >= scaling["max_replicas"]
        assert group["minReplicas"] * per_pod >= scaling["min_replicas"]
        assert group["maxReplicas"] >= scaling["max_replicas"] / per_pod
        gpus = pods(overlay)[group["groupName"]].main["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert actor.get("num_gpus", 0) * per_pod == int(gpus) or name == "Ingress"
    for name, group in groups(overlay).items():
        units = offered(group)
        wanted = sum(
            actor["num_cpus"] * units[resource] / amount
            for options in deployments(overlay).values()
            for actor in [options["ray_actor_options"]]
            for resource, amount in actor["resources"].items()
            if resource in units
        )
        assert wanted <= quantity(pods(overlay)[name].main["resources"]["limits"]["cpu"])
    assert ray_cluster(overlay)["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_memory_fits(overlay: str) -> None:
    """A pod's limit holds its shared memory, its replicas' page pools and what they write to the node's
    memory; a segment's holds the segment.
    """
    settings = Settings.model_validate(arguments(overlay))
    params = {"head": ray_cluster(overlay)["headGroupSpec"]["rayStartParams"]}
    params |= {name: group["rayStartParams"] for name, group in groups(overlay).items()}
    pools = {"head": 0, "encoder": settings.encoder.pool_bytes, "embedder": settings.embedder.pool_bytes}
    for name, pool_bytes in pools.items():
        shared = quantity(pods(overlay)[name].volume("shared-mem")["emptyDir"]["sizeLimit"])
        of_pod, of_node = host_memory(overlay, name, settings)
        assert int(params[name]["object-store-memory"]) + of_pod < shared
        limit = quantity(pods(overlay)[name].main["resources"]["limits"]["memory"])
        assert shared + pool_bytes + of_node < limit
    segment = pods(overlay)["store-segment"]
    limit = quantity(segment.main["resources"]["limits"]["memory"])
    assert int(segment.environment()["SEGMENT_BYTES"]) + 2**28 < limit


def host_memory(overlay: str, name: str, settings: Settings) -> tuple[int, int]:
    """Bytes of rows in a pod's own shared memory, and in its node's, which is a volume of a claim."""
    store = settings.store
    if name == "head" or not store.host_bytes:
        return 0, 0
    mounts = {one["mountPath"]: one for one in pods(overlay)[name].main["volumeMounts"]}
    mount = mounts[store.host_path]
    if mount["name"] == "shared-mem":
        return store.host_bytes, 0
    claim = pods(overlay)[name].volume(mount["name"])["persistentVolumeClaim"]["claimName"]
    volume = by_name(overlay, "PersistentVolumeClaim", claim)["spec"]["volumeName"]
    spec = by_name(overlay, "PersistentVolume", volume)["spec"]
    assert spec["hostPath"]["path"] == "/dev/shm"
    assert spec["claimRef"] == {"namespace": "epd", "name": claim}
    assert quantity(spec["capacity"]["storage"]) >= store.host_bytes
    return 0, store.host_bytes


def test_mounts_have_volumes(overlay: str) -> None:
    """Every mount has its volume, and every claim, map and secret is made here or told of in the guide."""
    guide = (ROOT / "docs/kubernetes.md").read_text()
    made = {(document["kind"], document["metadata"]["name"]) for document in build(overlay)}
    for one in pods(overlay).values():
        claims = {volume["name"] for volume in one.spec.get("volumes", ())}
        for workload in of_kind(overlay, "StatefulSet"):
            if workload["metadata"]["name"] == one.name:
                templates = workload["spec"].get("volumeClaimTemplates", ())
                claims |= {template["metadata"]["name"] for template in templates}
        for container in one.all_containers:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= claims
        for mapping in walk(one.spec):
            if claim := mapping.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in made
            if reference := mapping.get("configMapRef"):
                assert ("ConfigMap", reference["name"]) in made
            for secret in (mapping.get("secret"), mapping.get("secretKeyRef")):
                if secret:
                    name = secret.get("secretName") or secret["name"]
                    assert f"create secret generic {name} " in guide
    assert not of_kind(overlay, "Secret")


def test_api_keys_are_read_where_they_are_mounted(overlay: str) -> None:
    """auth.keys_file lies in the volume of the Secret; the demo asks for no keys."""
    auth = Settings.model_validate(arguments(overlay)).auth
    if overlay == "cpu-demo":
        assert not auth.enabled
        return
    assert auth.keys_file is not None
    folder, _, key = auth.keys_file.rpartition("/")
    for name in ("head", "encoder", "embedder"):
        (mount,) = (one for one in pods(overlay)[name].main["volumeMounts"] if one["mountPath"] == folder)
        assert pods(overlay)[name].volume(mount["name"])["secret"]["secretName"] == "epd-api-keys"
    assert f"--from-file={key}=" in (ROOT / "docs/kubernetes.md").read_text()


def test_the_model_is_where_the_download_puts_it(overlay: str) -> None:
    """Settings, download and the pods that wait for it name one folder of the models' volume."""
    model = Settings.model_validate(arguments(overlay)).model
    if overlay == "cpu-demo":
        assert model.path == "demo"
        return
    data = by_name(overlay, "ConfigMap", "epd-model")["data"]
    assert data["MODEL_FOLDER"] == model.path
    assert data["MODEL_ID"] == model.served_name
    for name in ("head", "encoder", "embedder"):
        (waiting,) = pods(overlay)[name].spec["initContainers"]
        assert waiting["envFrom"] == [{"configMapRef": {"name": "epd-model"}}]


def test_a_pod_lives_longer_than_the_drain(overlay: str) -> None:
    """Requests end before replicas must, replicas before the drain, and the drain before the pod."""
    settings = Settings.model_validate(arguments(overlay))
    (application,) = ServeDeploySchema.model_validate(serve_config(overlay)).applications
    http_timeout_s = serve_config(overlay)["http_options"]["request_timeout_s"]
    assert http_timeout_s > settings.limits.request_timeout_s
    for deployment in application.deployments:
        assert deployment.graceful_shutdown_timeout_s > http_timeout_s
        one = pods(overlay)[GROUP_OF[deployment.name]]
        program, seconds = one.main["lifecycle"]["preStop"]["exec"]["command"]
        assert (ROOT / "scripts" / program.removeprefix("epd-")).exists()
        assert (
            deployment.graceful_shutdown_timeout_s
            < float(seconds)
            < one.spec["terminationGracePeriodSeconds"]
        )
