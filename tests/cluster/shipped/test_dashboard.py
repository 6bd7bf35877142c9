"""The Grafana dashboard against what Ray and Mooncake really publish."""

from __future__ import annotations

import json
import re

import httpx
import pytest

from tests.cluster.mixed_items import cases, embed
from tests.cluster.server import ROOT, Server, wait_until

pytestmark = pytest.mark.cluster

_SELECTOR = re.compile(r"\b((?:ray|master)_[a-z_]+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')

Series = tuple[str, frozenset[tuple[str, str]]]
"""A metric's name, and labels of it."""


def selected() -> set[Series]:
    """What the dashboard's queries select, by equal labels."""
    dashboard = json.loads((ROOT / "k8s/base/dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return {
        (name, frozenset(label for label in _LABEL.findall(labels)))
        for query in queries
        for name, labels in _SELECTOR.findall(query.replace('step!="total"', ""))
    }


def published(server: Server) -> set[Series]:
    """Every series on the Prometheus pages of Ray's node and of mooncake_master."""
    targets = [*server.metric_targets(), f"127.0.0.1:{server.metrics_port}"]
    pages = [httpx.get(f"http://{target}/metrics", timeout=10).text for target in targets]
    found = (re.match(r"([a-z_]+)(?:\{(.*)\})? ", line) for page in pages for line in page.splitlines())
    return {(match[1], frozenset(_LABEL.findall(match[2] or ""))) for match in found if match}


def test_every_query_of_the_dashboard_finds_a_series(server: Server, photo: bytes) -> None:
    """Once the service has worked, each selector of the dashboard matches what Ray or Mooncake publishes."""
    embed(server, cases(photo, seed=70))
    wanted = selected()
    assert len(wanted) > 20

    def missing() -> set[Series]:
        there = published(server)
        return {
            (name, labels)
            for name, labels in wanted
            if not any(name == other and labels <= theirs for other, theirs in there)
        }

    try:
        wait_until(lambda: not missing(), 60, "a series for every query")
    except TimeoutError:
        pytest.fail(f"no series for {missing()}")
