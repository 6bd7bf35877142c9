"""What a pod may do, who reaches it, and what it asks of its node."""

from __future__ import annotations

import pytest

from tests.k8s.manifests import (
    OVERLAYS,
    Document,
    Pods,
    by_name,
    needs_kubectl,
    of_kind,
    pods,
    ray_cluster,
    selects,
)

pytestmark = [needs_kubectl, pytest.mark.parametrize("overlay", OVERLAYS)]

RAY = ("head", "encoder", "embedder")


def test_no_container_has_privileges(overlay: str) -> None:
    """Everything runs as a plain user, on a read-only root, without capabilities or escalation."""
    securities = [ray_cluster(overlay)["autoscalerOptions"]["securityContext"]]
    for one in pods(overlay).values():
        assert one.spec["securityContext"]["runAsNonRoot"] is True
        assert one.spec["securityContext"]["runAsUser"] > 0
        assert one.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & one.spec.keys()
        assert all("hostPath" not in volume for volume in one.spec.get("volumes", ()))
        securities += [container["securityContext"] for container in one.all_containers]
    for security in securities:
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert not security.get("privileged")
    namespace = by_name(overlay, "Namespace", "epd")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_only_the_autoscaler_gets_a_token_of_the_cluster(overlay: str) -> None:
    """No pod but the head, beside which Ray's autoscaler runs, can speak to the API server."""
    with_token = {
        name for name, one in pods(overlay).items() if one.spec.get("automountServiceAccountToken", True)
    }
    assert with_token == {"head"}


def test_everything_is_bounded(overlay: str) -> None:
    """Each container says what it needs and what it may take, with as much memory needed as taken."""
    for one in pods(overlay).values():
        for container in one.all_containers:
            requests, limits = (container["resources"][key] for key in ("requests", "limits"))
            assert {"cpu", "memory"} <= requests.keys() & limits.keys()
            if container in one.containers and one.name != "epd-model-download":
                assert requests["memory"] == limits["memory"], one.name
        for volume in one.spec.get("volumes", ()):
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                assert "sizeLimit" in volume["emptyDir"]


def test_what_runs_on_is_probed(overlay: str) -> None:
    """Every lasting container is asked whether it started and whether it is ready."""
    for one in pods(overlay).values():
        if one.name != "epd-model-download":
            assert {"startupProbe", "readinessProbe"} <= one.main.keys(), one.name


def test_disruptions_are_budgeted(overlay: str) -> None:
    """Head, embedders, masters and segments are not taken all at once; the one-pod demo has no budgets."""
    budgets = of_kind(overlay, "PodDisruptionBudget")
    covered = {
        name
        for name, one in pods(overlay).items()
        if any(selects(budget["spec"]["selector"], one.labels) for budget in budgets)
    }
    wanted = {"head", "embedder", "store-master", "store-segment"}
    assert covered - {"etcd"} == (set() if overlay == "cpu-demo" else wanted)
    for budget in budgets:
        if "minAvailable" in budget["spec"]:  # a percentage would not work for KubeRay's pods
            assert isinstance(budget["spec"]["minAvailable"], int)


def open_ports(overlay: str, target: Pods, source: Pods | None) -> set[int] | None:
    """Ports of `target` that the policies open to `source`, or to anybody (None); None for all of them."""
    ports: set[int] = set()
    for policy in of_kind(overlay, "NetworkPolicy"):
        if not selects(policy["spec"]["podSelector"], target.labels):
            continue
        for rule in policy["spec"].get("ingress", ()):
            if "from" not in rule or any(comes_from(peer, source) for peer in rule["from"]):
                if "ports" not in rule:
                    return None
                ports |= {port["port"] for port in rule["ports"]}
    return ports


def comes_from(peer: Document, source: Pods | None) -> bool:
    return (
        source is not None and "namespaceSelector" not in peer and selects(peer["podSelector"], source.labels)
    )


def may_send(overlay: str, source: Pods, target: Pods, port: int | None) -> bool:
    """Whether `source` may open a connection to `port` of `target`, None for any port."""
    for policy in of_kind(overlay, "NetworkPolicy"):
        if not selects(policy["spec"]["podSelector"], source.labels):
            continue
        for rule in policy["spec"].get("egress", ()):
            peers = rule.get("to")
            if peers is not None and not any(selects(peer["podSelector"], target.labels) for peer in peers):
                continue
            if "ports" not in rule or port in {one["port"] for one in rule["ports"]}:
                return True
    return False


def test_only_http_is_reachable_from_outside(overlay: str) -> None:
    """A stranger reaches the HTTP port of the workers, and no other port of any pod."""
    deny = by_name(overlay, "NetworkPolicy", "epd-default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for name, one in pods(overlay).items():
        assert open_ports(overlay, one, None) == ({8000} if name in ("encoder", "embedder") else set()), name


def test_the_parts_reach_each_other(overlay: str) -> None:
    """Ray's pods reach each other, the masters and the segments; segments reach the masters."""
    all_pods = pods(overlay)
    master, segment = all_pods["store-master"], all_pods["store-segment"]
    for source in (all_pods[name] for name in RAY):
        for target in (all_pods[name] for name in RAY):
            assert open_ports(overlay, target, source) is None
            assert may_send(overlay, source, target, None)
        assert open_ports(overlay, master, source) == {50051}
        assert may_send(overlay, source, master, 50051)
        assert open_ports(overlay, segment, source) is None
        assert may_send(overlay, source, segment, None)
    assert may_send(overlay, segment, master, 50051)
    assert open_ports(overlay, master, segment) == {50051}
    if etcd := all_pods.get("etcd"):
        for source in (master, segment, *(all_pods[name] for name in RAY)):
            assert open_ports(overlay, etcd, source) == {2379}
            assert may_send(overlay, source, etcd, 2379)
        assert open_ports(overlay, etcd, etcd) == {2380}
        assert open_ports(overlay, all_pods["redis"], all_pods["head"]) == {6379}
        assert may_send(overlay, all_pods["head"], all_pods["redis"], 6379)


def test_prometheus_reaches_the_metrics(overlay: str) -> None:
    """The ports that pods name `metrics` are open to Prometheus."""
    (rule,) = by_name(overlay, "NetworkPolicy", "epd-metrics")["spec"]["ingress"]
    opened = {port["port"] for port in rule["ports"]}
    for one in pods(overlay).values():
        assert {one.ports()["metrics"]} <= opened if "metrics" in one.ports() else True


def test_stages_are_told_apart_by_labels(overlay: str) -> None:
    """Each component's label is its own, and every pod carries the application's."""
    assert all(one.labels["app.kubernetes.io/name"] == "epd" for one in pods(overlay).values())
    assert set(RAY) | {"store-master", "store-segment"} <= pods(overlay).keys()
