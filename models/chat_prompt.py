"""Items to token sequences, by the template of Qwen3-VL-Embedding."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from epd.cache.types import MediaGrid
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem
from epd.models.tokenizer import TextTokenizer, as_ids
from epd.models.types import TokenSequence
from epd.models.written import Written

DEFAULT_INSTRUCTION = "Represent the user's input."


class ChatPrompt:
    """Renders an item as a system turn that holds the instruction, a user turn that holds its parts, and
    the opening of the assistant's turn, within what the tokenizer itself adds.

    A picture is `<|vision_start|>`, as many `<|image_pad|>` as it has merged tokens, `<|vision_end|>`.
    Source: the chat template and the reference code of Qwen3-VL-Embedding. Safe to call from several threads.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError when the tokenizer lacks a token of the template."""
        config = checkpoint.config
        self._tokenizer = TextTokenizer(checkpoint)
        self._merge_size: int = config.vision_config.spatial_merge_size
        special, encode = self._tokenizer.special, self._tokenizer.encode
        turn_start, turn_end = special("<|im_start|>"), special("<|im_end|>")
        self._start = as_ids([turn_start])
        self._next_turn = as_ids([turn_end, *encode("\n"), turn_start])
        self._end = as_ids([*self._next_turn, *encode("assistant\n")])
        self._vision_start = as_ids([special("<|vision_start|>")])
        self._vision_end = as_ids([special("<|vision_end|>")])
        self._pad = special("<|image_pad|>")
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
        """See `Prompt.render`. `instruction`: None or blank for the default one."""
        if not any(parts):
            raise InvalidItem("the item is empty")
        written = Written(self._tokenizer)
        written.add_ids(self._start)
        written.add_text("system\n" + complete_instruction(instruction))
        written.add_ids(self._next_turn)
        written.add_text("user\n")
        for part in parts:
            if isinstance(part, str):
                written.add_users_text(part)
            else:
                written.add_ids(self._vision_start)
                written.add_media(self._pad, part, part.num_tokens(self._merge_size))
                written.add_ids(self._vision_end)
        written.add_ids(self._end)
        return written.sequence(max_tokens)


def complete_instruction(instruction: str | None) -> str:
    """Stripped, and with a full stop when it ends in no punctuation (Unicode category P); the default one
    when there is none. Source: the reference code of Qwen3-VL-Embedding.
    """
    stripped = (instruction or "").strip()
    if not stripped:
        return DEFAULT_INSTRUCTION
    return stripped if unicodedata.category(stripped[-1]).startswith("P") else stripped + "."
