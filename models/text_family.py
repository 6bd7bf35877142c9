"""What families without pictures have in common."""

from __future__ import annotations

from typing import ClassVar, NoReturn

import torch

from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError
from epd.models.pooling import Pooling
from epd.models.sentence_config import SentenceConfig
from epd.models.text_prompt import TextPrompt
from epd.models.tokenizer import TextTokenizer


class TextFamily:
    """See `epd.models.base.Family`. Subclasses add `causal` and `load_embedder`."""

    takes_images = False
    merge_size = 1
    encoder_prefix: str | None = None
    default_pooling: ClassVar[Pooling]
    instruction_template: ClassVar[str | None] = None
    wrapper: ClassVar[str]  # what weights are named with when the checkpoint holds a head, such as "model."

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        said = SentenceConfig.read(checkpoint, self.default_pooling)
        most: int = config.max_position_embeddings
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.max_tokens = min(most, said.max_tokens or most)
        self.pooling: Pooling = said.pooling
        self.normalize = said.normalize
        wrapped = any(name.startswith(self.wrapper) for name in checkpoint.weights.names)
        self.embedder_prefix = self.wrapper if wrapped else ""

    def row_layout(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """No pictures, no rows."""

    def encoder_digest(self, checkpoint: Checkpoint) -> NoReturn:
        """Raises CheckpointError: there is no encoder."""
        raise _no_vision(checkpoint)

    def load_encoder(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str
    ) -> NoReturn:
        """Raises CheckpointError: there is no encoder."""
        raise _no_vision(checkpoint)

    def make_prompt(self, checkpoint: Checkpoint) -> TextPrompt:
        """Raises CheckpointError when the tokenizer does not fit."""
        return TextPrompt(TextTokenizer(checkpoint), self.instruction_template)


def _no_vision(checkpoint: Checkpoint) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.name} ({checkpoint.model_type}) has no vision tower: it embeds text only"
    )
