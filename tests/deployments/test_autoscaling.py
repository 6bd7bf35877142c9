"""How many replicas a backlog asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from epd.deployments.autoscaling import WAITING_TOKENS, TokenBacklogPolicy


@dataclass
class FakeContext:
    """The part of Serve's AutoscalingContext that the policy reads."""

    total_num_requests: float = 0
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("waiting", "requests", "replicas"),
    [
        ({}, 0, 0),
        ({}, 3, 1),
        ({"a": 0.0}, 0, 0),
        ({"a": 0.0}, 2, 1),
        ({"a": 100.0}, 1, 1),
        ({"a": 100.0, "b": 1.0}, 1, 2),
        ({"a": 350.0, "b": 350.0}, 1, 7),
    ],
)
def test_replicas_follow_the_tokens_that_wait(
    waiting: dict[str, float], requests: float, replicas: int
) -> None:
    """One replica for each `target_tokens`; with nobody to report, requests call for one."""
    context = FakeContext(requests, {WAITING_TOKENS: waiting} if waiting else {})
    assert TokenBacklogPolicy(100)(context) == (replicas, {})


def test_a_target_of_nothing_is_refused() -> None:
    """`target_tokens` must be positive."""
    with pytest.raises(ValueError, match="got 0"):
        TokenBacklogPolicy(0)
