"""Embeds in this process, over the models alone: no Ray, no cache, no store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.utils.logging import disable_progress_bar

from epd.cache.types import MediaGrid
from epd.cli.embedders import CannotEmbed, Failed, Vector
from epd.cli.files import Item
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem
from epd.models.families import family_of, resolve_dtype
from epd.models.images import ImagePreprocessor
from epd.models.packing import pack
from epd.models.pooling import finish, pool
from epd.models.types import TokenSequence


class LocalEmbedder:
    """`Embed` with both stages of one checkpoint in this process, on a GPU where torch sees one.

    Every batch runs as one packed forward of each stage. An item that cannot be read fails alone.
    """

    def __init__(self, model: str, instruction: str | None = None, dimensions: int | None = None) -> None:
        """Raises CannotEmbed when the checkpoint cannot be loaded or has fewer than `dimensions` values."""
        disable_progress_bar()  # transformers draws one for each load
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._instruction = instruction
        self._dimensions = dimensions
        try:
            checkpoint = Checkpoint.open(model)
            self._family = family_of(checkpoint)
            dtype = resolve_dtype(checkpoint, "auto", self._device)
            self._prompt = self._family.make_prompt(checkpoint)
            self._embedder = self._family.load_embedder(checkpoint, dtype, self._device)
            if self._family.takes_images:
                self._images = ImagePreprocessor(checkpoint)
                self._encoder = self._family.load_encoder(checkpoint, dtype, self._device)
        except CheckpointError as error:
            raise CannotEmbed(str(error)) from error
        if dimensions is not None and not 1 <= dimensions <= self._family.hidden_size:
            raise CannotEmbed(f"--dimensions must be between 1 and {self._family.hidden_size}")

    def __call__(self, items: Sequence[Item]) -> list[Vector | Failed]:
        results: dict[int, Vector | Failed] = {}
        sequences: dict[int, TokenSequence] = {}
        pictures: list[tuple[torch.Tensor, MediaGrid]] = []
        for i, item in enumerate(items):
            try:
                sequences[i], found = self._prepare(item)
            except InvalidItem as error:
                results[i] = Failed(str(error))
            else:
                pictures += found
        if sequences:
            vectors = self._run(list(sequences.values()), pictures)
            results |= zip(sequences, vectors, strict=True)
        return [results[i] for i in range(len(items))]

    def _prepare(self, item: Item) -> tuple[TokenSequence, list[tuple[torch.Tensor, MediaGrid]]]:
        pictures = []
        if "image" in item:
            if not self._family.takes_images:
                raise InvalidItem("this model takes text only")
            pictures.append(self._images.patches(item["image"]))
        parts: list[str | MediaGrid] = [grid for _, grid in pictures]
        if "text" in item:
            parts.append(item["text"])
        sequence = self._prompt.render(parts, self._instruction)
        if sequence.num_tokens > self._family.max_tokens:
            raise InvalidItem(f"{sequence.num_tokens} tokens, and the model takes {self._family.max_tokens}")
        return sequence, pictures

    def _run(
        self, sequences: Sequence[TokenSequence], pictures: Sequence[tuple[torch.Tensor, MediaGrid]]
    ) -> list[Vector]:
        batch = pack(sequences, self._device, self._family.merge_size)
        if pictures:
            patches, grids = zip(*pictures, strict=True)
            batch = batch.with_rows(torch.cat(self._encoder.encode(patches, grids)))
        hidden_TH = self._embedder.forward(batch, SkipKV(SequenceLayout(batch.lengths, self._device)))
        vectors = pool(hidden_TH, batch.lengths, self._family.pooling)
        finished = finish(vectors, self._dimensions, normalize=self._family.normalize)
        return list(finished.cpu().numpy())
