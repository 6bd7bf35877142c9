"""What a replica counts, as it reaches Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epd.deployments.metrics import Exporter


class FakeSink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.counts: list[tuple[str, float]] = []
        self.levels: dict[str, float] = {}

    def count(self, name: str, increase: float) -> None:
        self.counts.append((name, increase))

    def level(self, name: str, value: float) -> None:
        self.levels[name] = value


async def test_counts_go_by_their_increase_and_levels_as_they_are() -> None:
    """A count is exported at once, if at 0, then by what it grew; nested numbers go by their own name."""
    stats: dict[str, Any] = {
        "encodes": 2,
        "queued_tokens": 7,
        "pid": 1,
        "cache": {"hits_local": 0, "pages": 9},
    }
    sink = FakeSink()

    async def read() -> Mapping[str, Any]:
        return stats

    exporter = Exporter(read, sink)
    await exporter.export()
    assert sorted(sink.counts) == [("encodes", 2), ("hits_local", 0)]
    assert sink.levels == {"queued_tokens": 7, "pages": 9}

    stats |= {"encodes": 5, "queued_tokens": 0, "cache": {"hits_local": 1, "pages": 9}}
    await exporter.export()
    assert sorted(sink.counts[2:]) == [("encodes", 3), ("hits_local", 1)]
    assert sink.levels["queued_tokens"] == 0
