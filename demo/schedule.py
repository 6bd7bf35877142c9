"""How strongly each step learns, and how long the scaffold stands."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Linear warm-up, then half a cosine down to `floor`; the attribute heads fade out before the end."""

    num_steps: int
    peak: float = 4e-3  # learning rate
    warm_up: int = 60  # steps
    floor: float = 0.03  # of the peak
    heads_end: float = 0.7  # of the steps

    def learning_rate(self, step: int) -> float:
        """Learning rate of `step`, counted from 0."""
        rise = min(1.0, (step + 1) / self.warm_up)
        fall = (1 + math.cos(math.pi * min(1.0, step / self.num_steps))) / 2
        return self.peak * rise * (self.floor + (1 - self.floor) * fall)

    def heads_weight(self, step: int) -> float:
        """Weight of the attribute heads' loss at `step`: from 1 down to 0."""
        return max(0.0, 1 - step / (self.heads_end * self.num_steps))
