"""BERT-like sentence encoders: bidirectional, for text."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from epd.cache.kv.base import KVShape
from epd.kernels.attention.base import AttentionPass
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError
from epd.models.loading import load_part
from epd.models.pooling import Pooling
from epd.models.text_family import TextFamily
from epd.models.types import PackedBatch

# A buffer that old checkpoints carry, a layer that embeddings do not use, and heads of pre-training.
_NOT_OURS = ("embeddings.position_ids", "pooler.", "cls.")


class BertLanguageModel:
    """See `epd.models.base.LanguageModel`. Every token sees its whole sequence."""

    causal = False

    def __init__(self, model: Any) -> None:
        config = model.config
        self._model = model
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        head_dim = config.hidden_size // config.num_attention_heads
        self.kv_shape = KVShape(config.num_hidden_layers, config.num_attention_heads, head_dim, head_dim)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, attention: AttentionPass) -> torch.Tensor:
        """Last hidden states `[T, hidden_size]`."""
        out = self._model(
            input_ids=batch.token_ids[None],
            token_type_ids=torch.zeros_like(batch.token_ids)[None],
            position_ids=batch.positions[:1],
            attention_pass=attention,
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


class BertFamily(TextFamily):
    """The text alone; mean pooling unless the checkpoint's `modules.json` says otherwise."""

    causal = False
    default_pooling: ClassVar[Pooling] = "mean"
    wrapper: ClassVar[str] = "bert."

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        if checkpoint.config.is_decoder:
            raise CheckpointError(f"{checkpoint.name}: a BERT that decodes (is_decoder) is not supported")

    def load_embedder(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> BertLanguageModel:
        """Raises CheckpointError when the weights do not fit."""
        model = load_part(
            "BertModel",
            checkpoint,
            self.embedder_prefix,
            checkpoint.config,
            dtype,
            device,
            not_ours=_NOT_OURS,
            add_pooling_layer=False,
        )
        return BertLanguageModel(model)
