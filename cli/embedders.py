"""What both ways of embedding have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from epd.cli.files import Item

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why an item has no vector."""

    reason: str


class CannotEmbed(Exception):
    """Nothing can be embedded at all: no service, no model, no permission. The message is for the user."""


class Embed(Protocol):
    """A service, or a model in this process."""

    def __call__(self, items: Sequence[Item]) -> list[Vector | Failed]:
        """A vector or a reason for each item, in order. Raises CannotEmbed."""
