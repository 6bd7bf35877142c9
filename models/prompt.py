"""Items to token sequences, by the template of Qwen3-VL-Embedding."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from epd.cache.types import MediaGrid
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem
from epd.models.tokenizer import TextTokenizer
from epd.models.types import MediaSpan, TokenSequence
from epd.models.written import Written

DEFAULT_INSTRUCTION = "Represent the user's input."


class Prompt:
    """Renders `<|im_start|>system\\n{instruction}<|im_end|>\\n<|im_start|>user\\n{parts}<|im_end|>\\n
    <|im_start|>assistant\\n`, and around it what the tokenizer itself adds.

    A picture is `<|vision_start|>`, as many `<|image_pad|>` as it has merged tokens, `<|vision_end|>`.
    Source: the chat template and the reference code of Qwen3-VL-Embedding.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError when the tokenizer lacks a token of the template."""
        config = checkpoint.config
        self._tokenizer = TextTokenizer(checkpoint)
        self._merge_size: int = config.vision_config.spatial_merge_size
        self._turn_start, self._turn_end = map(self._tokenizer.special, ("<|im_start|>", "<|im_end|>"))
        self._vision_start, self._pad, self._vision_end = (
            self._tokenizer.special(token) for token in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
        )
        if self._pad != config.image_token_id:
            raise CheckpointError(
                f"{checkpoint.name}: <|image_pad|> is {self._pad} for its tokenizer but image_token_id is "
                f"{config.image_token_id} in its configuration"
            )

    def render(
        self,
        parts: Sequence[str | MediaGrid],
        instruction: str | None = None,
        *,
        max_tokens: int | None = None,
    ) -> TokenSequence:
        """One item, its parts in the order given. `instruction`: None or blank for the default one.

        `max_tokens`: shorten the user's text from its end until the sequence is that short.
        Raises InvalidItem for an item without picture or text, for text that is not valid Unicode, and
        when the sequence is too long even without the user's text.
        """
        if not any(parts):
            raise InvalidItem("the item is empty")
        written = Written(self._tokenizer)
        written.add_token(self._turn_start)
        written.add_text("system\n" + _complete(instruction))
        written.add_token(self._turn_end)
        written.add_text("\n")
        written.add_token(self._turn_start)
        written.add_text("user\n")
        for part in parts:
            if isinstance(part, str):
                written.add_users_text(part)
            else:
                written.add_token(self._vision_start)
                written.add_media(self._pad, part, part.num_tokens(self._merge_size))
                written.add_token(self._vision_end)
        written.add_token(self._turn_end)
        written.add_text("\n")
        written.add_token(self._turn_start)
        written.add_text("assistant\n")
        return written.sequence(max_tokens)
