"""Qwen3-VL-Embedding: a vision tower with deepstack, and a causal language model with M-RoPE."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch

from epd.cache.kv.base import KVShape
from epd.cache.types import MediaGrid, RowLayout
from epd.kernels.attention.base import AttentionPass
from epd.kernels.attention.layout import SequenceLayout
from epd.kernels.attention.skip_kv import SkipKV
from epd.models.chat_prompt import ChatPrompt
from epd.models.checkpoint import Checkpoint
from epd.models.image_settings import byte_table
from epd.models.loading import load_part
from epd.models.patch_embedding import PatchEmbedding
from epd.models.pooling import Pooling
from epd.models.types import PackedBatch

ENCODER_PREFIX = "model.visual."
EMBEDDER_PREFIX = "model.language_model."


class Qwen3VLVisionTower:
    """The vision weights, and nothing of the language model."""

    def __init__(self, model: Any, attention: Callable[[SequenceLayout], AttentionPass] = SkipKV) -> None:
        """`model`: transformers' vision model with `PatchEmbedding` in place. `attention`: makes the pass of
        one forward from where its pictures lie.
        """
        self._model = model
        self._attention = attention
        for index, block in enumerate(model.blocks):
            block.attn.layer_idx = index  # transformers' own vision layers do not know theirs
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype

    @torch.inference_mode()
    def encode(self, patches: Sequence[torch.Tensor], grids: Sequence[MediaGrid]) -> list[torch.Tensor]:
        """Rows `[num_tokens, row_dim]` of each picture, on `device`, from one packed forward.

        A row is the merged feature, then the deepstack features in the order of the language layers that
        take them. `patches`: uint8 `[N, 3 * patch_size**2]` of each picture. Pictures do not see each other.
        Raises ValueError when patches and grids do not match.
        """
        sizes, said = [len(p) for p in patches], [grid.num_patches for grid in grids]
        if sizes != said or not sizes:
            raise ValueError(f"pictures of {sizes} patches do not match grids of {said}")
        frames = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
        pixels = torch.cat(list(patches)).to(self.device)
        out = self._model(
            pixels,
            grid_thw=torch.tensor([(grid.t, grid.h, grid.w) for grid in grids], device=self.device),
            # The layers split what they attend to along this: one piece, since the pass knows the pictures.
            cu_seqlens=torch.tensor([0, len(pixels)]),
            attention_pass=self._attention(SequenceLayout(frames, self.device)),
        )
        rows = torch.cat([out.pooler_output, *out.deepstack_features], dim=1)
        merge_size = self._model.spatial_merge_size
        return list(torch.split(rows, [grid.num_tokens(merge_size) for grid in grids]))


class Qwen3VLLanguageModel:
    """The language weights, and nothing of the vision tower. It sees rows, never pixels."""

    causal = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.hidden_size: int = config.hidden_size
        self.kv_shape = KVShape(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.head_dim
        )

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, attention: AttentionPass) -> torch.Tensor:
        """Last hidden states `[T, hidden_size]`.

        `batch.media_rows` replace the embeddings at `batch.media_index` and add to the hidden states
        behind the first layers (deepstack).
        """
        embeddings = self._model.embed_tokens(batch.token_ids)
        seen = deepstack = None
        if batch.media_rows is not None and batch.media_index is not None:
            merged, *deepstack = torch.split(batch.media_rows.to(self.dtype), self.hidden_size, dim=1)
            embeddings = embeddings.index_copy(0, batch.media_index, merged)
            seen = torch.zeros_like(batch.token_ids, dtype=torch.bool)
            seen = seen.index_fill_(0, batch.media_index, True)[None]
        out = self._model(
            inputs_embeds=embeddings[None],
            position_ids=batch.positions[:, None],
            use_cache=False,
            visual_pos_masks=seen,
            deepstack_visual_embeds=deepstack,
            attention_pass=attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


class Qwen3VLFamily:
    """See `epd.models.base.Family`."""

    takes_images = True
    pooling: Pooling = "last"
    normalize = True
    causal = True
    encoder_prefix: str | None = ENCODER_PREFIX
    embedder_prefix = EMBEDDER_PREFIX

    def __init__(self, checkpoint: Checkpoint) -> None:
        vision, text = checkpoint.config.vision_config, checkpoint.config.text_config
        self.hidden_size: int = text.hidden_size
        self.vocab_size: int = text.vocab_size
        self.max_tokens: int = text.max_position_embeddings
        self.merge_size: int = vision.spatial_merge_size

    def row_layout(self, checkpoint: Checkpoint, dtype: torch.dtype) -> RowLayout:
        """A row: the merged feature and one feature for each deepstack layer."""
        vision = checkpoint.config.vision_config
        return RowLayout(vision.out_hidden_size * (1 + len(vision.deepstack_visual_indexes)), dtype)

    def encoder_digest(self, checkpoint: Checkpoint) -> str:
        """256-bit hash in hex of the vision weights and configuration."""
        settings = _meaning(checkpoint.config.vision_config)
        said = json.dumps([checkpoint.weights_digest(ENCODER_PREFIX), settings], sort_keys=True)
        return blake2b(said.encode(), digest_size=32).hexdigest()

    def make_prompt(self, checkpoint: Checkpoint) -> ChatPrompt:
        """Raises CheckpointError when the tokenizer does not fit."""
        return ChatPrompt(checkpoint)

    def load_encoder(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        attention: Callable[[SequenceLayout], AttentionPass] = SkipKV,
    ) -> Qwen3VLVisionTower:
        """Reads `model.visual.*` alone. Raises CheckpointError when the weights do not fit."""
        config = checkpoint.config.vision_config
        model = load_part("Qwen3VLVisionModel", checkpoint, ENCODER_PREFIX, config, dtype, device)
        model.patch_embed = PatchEmbedding(model.patch_embed.proj, byte_table(checkpoint))
        return Qwen3VLVisionTower(model, attention)

    def load_embedder(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> Qwen3VLLanguageModel:
        """Reads `model.language_model.*` alone. Raises CheckpointError when the weights do not fit."""
        config = checkpoint.config.text_config
        return Qwen3VLLanguageModel(
            load_part("Qwen3VLTextModel", checkpoint, EMBEDDER_PREFIX, config, dtype, device)
        )


def _meaning(config: Any) -> dict[str, Any]:
    """The settings of a configuration, without what does not decide values."""
    unrelated = ("transformers_version", "dtype", "_name_or_path", "architectures")
    return {name: value for name, value in config.to_diff_dict().items() if name not in unrelated}
