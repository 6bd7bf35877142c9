"""What the rest of the program sees of a model family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from epd.cache.kv.base import KVShape
from epd.cache.types import MediaGrid, RowLayout
from epd.kernels.attention.base import AttentionPass
from epd.models.checkpoint import Checkpoint
from epd.models.pooling import Pooling
from epd.models.prompt import Prompt
from epd.models.types import PackedBatch


class VisionTower(Protocol):
    """The encoder's model."""

    device: torch.device
    dtype: torch.dtype

    def encode(self, patches: Sequence[torch.Tensor], grids: Sequence[MediaGrid]) -> list[torch.Tensor]:
        """Rows `[num_tokens, row_dim]` of each picture, on `device`, from one packed forward."""


class LanguageModel(Protocol):
    """The embedder's model."""

    device: torch.device
    dtype: torch.dtype
    kv_shape: KVShape
    causal: bool

    def forward(self, batch: PackedBatch, attention: AttentionPass) -> torch.Tensor:
        """Last hidden states `[T, hidden_size]` of a packed batch, in `dtype` on `device`."""


class Family(Protocol):
    """What a checkpoint is, as a member of its family, and how its parts are loaded.

    `takes_images`: whether there is a vision tower. `hidden_size`: values of a vector. `pooling` and
    `normalize`: how hidden states become one. `merge_size`: side of the square of patches that make one token
    (1 without pictures). `max_tokens`: the longest sequence. `vocab_size`: rows of the token table. `causal`:
    whether tokens see only what precedes them. `encoder_prefix` (None without pictures) and
    `embedder_prefix`: what the names of each part's weights start with.
    The methods take the checkpoint that the family was made for.
    """

    takes_images: bool
    hidden_size: int
    vocab_size: int
    max_tokens: int
    merge_size: int
    pooling: Pooling
    normalize: bool
    causal: bool
    encoder_prefix: str | None
    embedder_prefix: str

    def row_layout(self, checkpoint: Checkpoint, dtype: torch.dtype) -> RowLayout | None:
        """Layout of a picture's rows; None for a family without pictures."""

    def encoder_digest(self, checkpoint: Checkpoint) -> str:
        """256-bit hash in hex of the encoder's weights and of the settings that decide its rows.

        Raises CheckpointError when there is no encoder.
        """

    def make_prompt(self, checkpoint: Checkpoint) -> Prompt:
        """Raises CheckpointError when the tokenizer does not fit."""

    def load_encoder(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> VisionTower:
        """Reads the vision weights alone. Raises CheckpointError when there are none or they do not fit."""

    def load_embedder(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> LanguageModel:
        """Reads the language weights alone. Raises CheckpointError when they do not fit."""
