"""How many replicas a stage should have: by the tokens that wait for it, not by requests.

Use it in a deployment's options, in a Serve config file or in the builder:

    autoscaling_config:
      min_replicas: 1
      max_replicas: 8
      policy:
        policy_function: epd.deployments.autoscaling:TokenBacklogPolicy
        policy_kwargs: {target_tokens: 16384}

Bounds and delays of `autoscaling_config` apply to what the policy says.
"""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

# What a replica reports from `record_autoscaling_stats`.
WAITING_TOKENS = "waiting_tokens"


class TokenBacklogPolicy:
    """One replica for every `target_tokens` that wait or run: picture tokens for encoders, all for embedders.

    With no replica there is nobody to report tokens: then requests that wait at the handles call for one.
    """

    def __init__(self, target_tokens: int) -> None:
        if target_tokens < 1:
            raise ValueError(f"target_tokens must be positive, got {target_tokens}")
        self._target_tokens = target_tokens

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reported = (ctx.aggregated_metrics or {}).get(WAITING_TOKENS, {})
        wanted = math.ceil(sum(reported.values()) / self._target_tokens)
        if not wanted and (ctx.total_num_requests or 0) > 0:
            wanted = 1
        return wanted, {}
