"""Embedding pictures and captions through the project's own parts, without a server."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epd.cache.types import MediaGrid
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.checkpoint import Checkpoint
from epd.models.families import family_of
from epd.models.images import ImagePreprocessor
from epd.models.packing import pack
from epd.models.pooling import finish, pool


class Embedder:
    """Encoder, prompt, packed forward and pooling of one checkpoint, in float32 on the CPU."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError when the checkpoint does not fit its family."""
        self._family = family_of(checkpoint)
        self._images = ImagePreprocessor(checkpoint)
        self._prompt = self._family.make_prompt(checkpoint)
        self._vision = self._family.load_encoder(checkpoint, torch.float32, "cpu")
        self._language = self._family.load_embedder(checkpoint, torch.float32, "cpu")

    def embed_pictures(self, pictures: Sequence[bytes]) -> torch.Tensor:
        """Vectors `[B, H]` of pictures, given as the bytes of their files."""
        cut = [self._images.patches(picture) for picture in pictures]
        grids = [grid for _, grid in cut]
        rows = torch.cat(self._vision.encode([patches for patches, _ in cut], grids))
        return self._embed(grids, rows)

    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Vectors `[B, H]` of texts."""
        return self._embed(texts, None)

    def _embed(self, parts: Sequence[str | MediaGrid], rows_VR: torch.Tensor | None) -> torch.Tensor:
        sequences = [self._prompt.render([part]) for part in parts]
        batch = pack(sequences, "cpu", self._family.merge_size)
        if rows_VR is not None:
            batch = batch.with_rows(rows_VR)
        hidden_TH = self._language.forward(batch, SkipKV(SequenceLayout(batch.lengths)))
        vectors = pool(hidden_TH, batch.lengths, self._family.pooling)
        return finish(vectors, normalize=self._family.normalize)
