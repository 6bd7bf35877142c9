"""The Grafana dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tests.k8s.manifests import ROOT, by_name, needs_kubectl

DASHBOARD = json.loads((ROOT / "k8s/base/dashboard.json").read_text())
SOURCES = "\n".join(
    path.read_text()
    for room in ("cache", "deployments", "models")
    for path in sorted((ROOT / room).rglob("*.py"))
)
# What the master says of itself, as read from its own page; Serve's, from Ray's source.
OTHERS = {
    "master_allocated_bytes",
    "master_total_capacity_bytes",
    "master_key_count",
    "master_successful_evictions_total",
    "ray_serve_deployment_replica_healthy",
}


def expressions() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_every_metric_is_exported() -> None:
    """A panel names EPD's metrics as Ray exports them, or known ones of Mooncake and Serve."""
    names = {name for text in expressions() for name in re.findall(r"\b(?:ray|master)_\w+", text)}
    assert names >= OTHERS
    for name in names - OTHERS:
        plain = name.removeprefix("ray_").removesuffix("_bucket")
        assert f'"{plain}"' in SOURCES, name


def test_every_event_level_and_step_is_counted() -> None:
    """What a panel picks by a label's value is something that replicas count under that name."""
    picked = [pair for text in expressions() for pair in re.findall(r'(event|level|step)="(\w+)"', text)]
    assert len(picked) > 20
    for label, value in picked:
        assert re.search(rf'"{value}"|^    {value}: int', SOURCES, re.M), (label, value)


def test_panels_do_not_overlap() -> None:
    """Each has its own number and its own place."""
    panels = DASHBOARD["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels) == len({panel["id"] for panel in panels})
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


@needs_kubectl
def test_grafana_finds_it() -> None:
    """The ConfigMap carries the whole dashboard and the label that Grafana's sidecar looks for."""
    config_map = by_name("base", "ConfigMap", "epd-dashboard")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["epd.json"]) == DASHBOARD
