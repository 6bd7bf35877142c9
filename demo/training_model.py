"""The forward that is trained: our prompt, packing, attention and pooling around transformers' modules.

Serving runs the same steps without gradients and with the picture rows in a cache between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F
from transformers import Qwen3VLForConditionalGeneration

from epd.cache.types import MediaGrid
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.attention import IMPLEMENTATION
from epd.models.checkpoint import Checkpoint
from epd.models.images import ImagePreprocessor
from epd.models.packing import pack
from epd.models.pooling import finish, pool
from epd.models.prompt import Prompt


class TrainingModel(nn.Module):
    """A checkpoint that embeds captions and pictures with gradients, on the CPU in float32."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.full = Qwen3VLForConditionalGeneration.from_pretrained(checkpoint.folder, dtype=torch.float32)
        self.full.model.language_model.set_attn_implementation(IMPLEMENTATION)
        self._prompt = Prompt(checkpoint)
        self._images = ImagePreprocessor(checkpoint)
        self._merge_size: int = checkpoint.config.vision_config.spatial_merge_size
        self._frames: int = checkpoint.config.vision_config.temporal_patch_size

    @property
    def dim(self) -> int:
        """Size of a vector."""
        return int(self.full.config.text_config.hidden_size)

    @property
    def row_dim(self) -> int:
        """Size of a picture token's row: the tower's output and its deepstack features."""
        return self.dim * (1 + len(self.full.config.vision_config.deepstack_visual_indexes))

    def encode(self, pictures: Sequence[bytes]) -> tuple[list[torch.Tensor], list[MediaGrid]]:
        """Rows `[num_tokens, row_dim]` of each picture, and the grids."""
        patches, grids = zip(*(self._images.patches(picture) for picture in pictures), strict=True)
        values_NCP = self._images.table.gather(1, torch.cat(patches).long().view(-1, 3, _area(patches[0])).transpose(0, 1).flatten(1))
        raise NotImplementedError

    def embed(self, items: Sequence[str | bytes]) -> torch.Tensor:
        raise NotImplementedError
