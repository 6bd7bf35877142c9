"""The same items without a service: packed forwards of both stages in this process, by `epd.models` alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.load_items import Item
from epd.cache.types import MediaGrid
from epd.deployments.settings import ModelSettings
from epd.deployments.stage import open_model
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.images import ImagePreprocessor
from epd.models.packing import pack
from epd.models.pooling import finish, pool
from epd.models.types import TokenSequence

BATCH_ITEMS = 64


class Offline:
    """Knows every item beforehand: batches of 64, and each distinct picture decoded and encoded once."""

    def __init__(self, path: str) -> None:
        model = open_model(ModelSettings(path=path, device="cpu"))
        self._family, self._device = model.family, model.device
        self._prompt = model.family.make_prompt(model.checkpoint)
        self._images = ImagePreprocessor(model.checkpoint)
        self._tower = model.family.load_encoder(model.checkpoint, model.dtype, model.device)
        self._language_model = model.family.load_embedder(model.checkpoint, model.dtype, model.device)

    def embed(
        self, items: Sequence[Item], rows: dict[bytes, torch.Tensor] | None = None
    ) -> npt.NDArray[np.float32]:
        """Vectors `[len(items), hidden_size]`. rows: of pictures known before; new ones are added."""
        rows = {} if rows is None else rows
        vectors = [
            self._embed_batch(items[start : start + BATCH_ITEMS], rows)
            for start in range(0, len(items), BATCH_ITEMS)
        ]
        return np.concatenate(vectors)

    def _embed_batch(self, items: Sequence[Item], rows: dict[bytes, torch.Tensor]) -> npt.NDArray[np.float32]:
        pictures = [item.picture for item in items if item.picture is not None]
        new = [picture for picture in dict.fromkeys(pictures) if picture not in rows]
        if new:
            patches, grids = zip(*map(self._images.patches, new), strict=True)
            rows |= zip(new, self._tower.encode(list(patches), list(grids)), strict=True)
        sequences = [self._sequence(item) for item in items]
        batch = pack(sequences, self._device, self._family.merge_size)
        if pictures:
            batch = batch.with_rows(torch.cat([rows[picture] for picture in pictures]))
        attention = SkipKV(SequenceLayout(batch.lengths, self._device))
        states = pool(self._language_model.forward(batch, attention), batch.lengths, self._family.pooling)
        vectors: npt.NDArray[np.float32] = finish(states, normalize=self._family.normalize).numpy()
        return vectors

    def _sequence(self, item: Item) -> TokenSequence:
        parts: list[str | MediaGrid] = []
        if item.picture is not None:
            parts.append(self._images.grid(item.picture))
        if item.text is not None:
            parts.append(item.text)
        return self._prompt.render(parts, None)
