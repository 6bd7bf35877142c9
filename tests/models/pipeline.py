"""The code under test from items to vectors, in one process, with seams for faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from epd.cache.types import MediaGrid
from epd.kernels.attention.base import AttentionPass
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.checkpoint import Checkpoint
from epd.models.families import family_of
from epd.models.images import ImagePreprocessor
from epd.models.packing import pack
from epd.models.pooling import finish, pool
from epd.models.types import PackedBatch, TokenSequence

MakePass = Callable[[SequenceLayout], AttentionPass]


def unchanged(batch: PackedBatch) -> PackedBatch:
    """No fault."""
    return batch


class Pipeline:
    """Both stages of one checkpoint. `embed` runs all items in one packed batch."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.family = family_of(self.checkpoint)
        self.device = device
        self.prompt = self.family.make_prompt(self.checkpoint)
        self.embedder = self.family.load_embedder(self.checkpoint, dtype, device)
        if self.family.takes_images:
            self.images = ImagePreprocessor(self.checkpoint)
            self.encoder = self.family.load_encoder(self.checkpoint, dtype, device)

    def embed(
        self,
        items: Sequence[Mapping[str, Any]],
        *,
        dimensions: int | None = None,
        fault: Callable[[PackedBatch], PackedBatch] = unchanged,
        attention: MakePass = SkipKV,
    ) -> npt.NDArray[np.float32]:
        """Vectors `[len(items), hidden_size or dimensions]`."""
        sequences = [self.sequence(item) for item in items]
        batch = pack(sequences, self.device, self.family.merge_size)
        if pictures := [part for item in items for part in item["parts"] if isinstance(part, bytes)]:
            batch = batch.with_rows(torch.cat(self.encode(pictures)))
        batch = fault(batch)
        hidden_TH = self.embedder.forward(batch, attention(SequenceLayout(batch.lengths, self.device)))
        vectors = pool(hidden_TH, batch.lengths, self.family.pooling)
        return finish(vectors, dimensions, normalize=self.family.normalize).cpu().numpy()

    def sequence(self, item: Mapping[str, Any]) -> TokenSequence:
        """Tokens of one item, from the headers of its pictures."""
        parts: list[str | MediaGrid] = [
            part if isinstance(part, str) else self.images.grid(part) for part in item["parts"]
        ]
        return self.prompt.render(parts, item.get("instruction"))

    def encode(self, pictures: Sequence[bytes]) -> list[torch.Tensor]:
        """Rows of each picture, from one packed forward."""
        patches, grids = zip(*map(self.images.patches, pictures), strict=True)
        return self.encoder.encode(patches, grids)
