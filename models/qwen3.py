"""Qwen3-Embedding: a causal language model for text."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from epd.cache.kv.base import KVShape
from epd.kernels.attention.base import AttentionPass
from epd.models.checkpoint import Checkpoint
from epd.models.loading import load_part
from epd.models.pooling import Pooling
from epd.models.text_family import TextFamily
from epd.models.types import PackedBatch


class Qwen3LanguageModel:
    """See `epd.models.base.LanguageModel`."""

    causal = True

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.kv_shape = KVShape(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.head_dim
        )

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, attention: AttentionPass) -> torch.Tensor:
        """Last hidden states `[T, hidden_size]`."""
        out = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[:1],
            use_cache=False,
            attention_pass=attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


class Qwen3Family(TextFamily):
    """Prompt: `Instruct: {instruction}\\nQuery:{text}`, or the text alone. Source: the model card."""

    causal = True
    default_pooling: ClassVar[Pooling] = "last"
    instruction_template: ClassVar[str | None] = "Instruct: {instruction}\nQuery:"
    wrapper: ClassVar[str] = "model."

    def load_embedder(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> Qwen3LanguageModel:
        """Raises CheckpointError when the weights do not fit."""
        model = load_part(
            "Qwen3Model",
            checkpoint,
            self.embedder_prefix,
            checkpoint.config,
            dtype,
            device,
            not_ours=("lm_head.",),
        )
        return Qwen3LanguageModel(model)
