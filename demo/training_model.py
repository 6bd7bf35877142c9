"""The forward that is trained: our prompt, packing, attention and pooling around transformers' modules.

Serving runs the same steps without gradients and with a cache between the picture's rows and the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Qwen3VLForConditionalGeneration

from epd.cache.types import MediaGrid
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.attention import IMPLEMENTATION
from epd.models.checkpoint import Checkpoint
from epd.models.families import family_of
from epd.models.images import ImagePreprocessor
from epd.models.packing import pack
from epd.models.pooling import finish, pool


class TrainingModel(nn.Module):
    """A checkpoint that embeds captions and pictures with gradients, on the CPU in float32.

    Shapes: N patches, V picture tokens, T packed tokens, B items, H vector size, R row size.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.full: Any = Qwen3VLForConditionalGeneration.from_pretrained(
            checkpoint.folder, dtype=torch.float32
        )
        self._text = self.full.model.language_model
        self._text.set_attn_implementation(IMPLEMENTATION)
        self._family = family_of(checkpoint)
        self._prompt = self._family.make_prompt(checkpoint)
        self._images = ImagePreprocessor(checkpoint)
        vision = checkpoint.config.vision_config
        self._frames: int = vision.temporal_patch_size
        self.dim = self._family.hidden_size
        self.row_dim: int = self.dim * (1 + len(vision.deepstack_visual_indexes))

    def encode(self, pictures: Sequence[bytes]) -> tuple[torch.Tensor, list[MediaGrid]]:
        """Rows `[V, R]` of all pictures (tower output, then deepstack features), and their grids."""
        cut = [self._images.patches(picture) for picture in pictures]
        grids = [grid for _, grid in cut]
        patches = torch.cat([patches for patches, _ in cut])
        patches_NCP = patches.reshape(len(patches), 3, -1).long()
        values_NCP = self._images.table[torch.arange(3)[:, None], patches_NCP]
        pixels = values_NCP.unsqueeze(2).expand(-1, -1, self._frames, -1).flatten(1)
        seen = self.full.model.visual(
            pixels, grid_thw=torch.tensor([(grid.t, grid.h, grid.w) for grid in grids])
        )
        return torch.cat([seen.pooler_output, *seen.deepstack_features], dim=1), grids

    def row_means(self, rows_VR: torch.Tensor, grids: Sequence[MediaGrid]) -> torch.Tensor:
        """Mean row `[B, R]` of each picture."""
        counts = torch.tensor([grid.num_tokens(self._family.merge_size) for grid in grids])
        return torch.segment_reduce(rows_VR, "mean", lengths=counts, axis=0)

    def embed(
        self, words: Sequence[str], rows_VR: torch.Tensor | None = None, grids: Sequence[MediaGrid] = ()
    ) -> torch.Tensor:
        """Unit vectors `[B, H]` of the pictures in `grids` (rows from `encode`), then of `words`."""
        parts: list[str | MediaGrid] = [*grids, *words]
        batch = pack([self._prompt.render([part]) for part in parts], "cpu", self._family.merge_size)
        embeds_TH = self._text.embed_tokens(batch.token_ids)
        picture_tokens, deepstack = None, None
        if rows_VR is not None and batch.media_index is not None:
            first, *deepstack = (rows_VR[:, at : at + self.dim] for at in range(0, self.row_dim, self.dim))
            embeds_TH = embeds_TH.index_copy(0, batch.media_index, first)
            picture_tokens = torch.zeros(1, batch.num_tokens, dtype=torch.bool)
            picture_tokens[0, batch.media_index] = True
        hidden_1TH = self._text(
            inputs_embeds=embeds_TH[None],
            position_ids=batch.positions[:, None],
            use_cache=False,
            visual_pos_masks=picture_tokens,
            deepstack_visual_embeds=deepstack,
            attention_pass=SkipKV(SequenceLayout(batch.lengths)),
        ).last_hidden_state
        return finish(pool(hidden_1TH[0], batch.lengths, self._family.pooling))
