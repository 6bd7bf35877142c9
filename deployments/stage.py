"""What both stages open alike: the model, and the embedding cache over its store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from epd.cache.keys import namespace
from epd.deployments.settings import Settings, StageSettings, StoreSettings
from epd.models.checkpoint import Checkpoint
from epd.models.families import Family, family_of, resolve_dtype

if TYPE_CHECKING:
    from epd.cache.controller import EmbeddingCache
    from epd.models.images import ImagePreprocessor


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A checkpoint with its family, and the dtype and device that this application computes in."""

    checkpoint: Checkpoint
    family: Family
    dtype: torch.dtype
    device: torch.device

    def namespace(self, images: ImagePreprocessor | None) -> str:
        ...


def open_model(settings: Settings) -> OpenModel: ...
