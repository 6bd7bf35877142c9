"""Text to token sequences, for families without pictures."""

from __future__ import annotations

from collections.abc import Sequence

from epd.cache.types import MediaGrid
from epd.models.errors import InvalidItem
from epd.models.tokenizer import TextTokenizer
from epd.models.types import TokenSequence
from epd.models.written import Written


class TextPrompt:
    """Text within what the tokenizer's own post-processor adds, and before it the instruction, if any.

    Safe to call from several threads.
    """

    def __init__(self, tokenizer: TextTokenizer, instruction_template: str | None) -> None:
        """`instruction_template`: text with `{instruction}` that goes before the user's when there is an
        instruction; None for models that were trained without.
        """
        self._tokenizer = tokenizer
        self._template = instruction_template

    def render(
        self,
        parts: Sequence[str | MediaGrid],
        instruction: str | None = None,
        *,
        max_tokens: int | None = None,
    ) -> TokenSequence:
        """See `Prompt.render`. Raises InvalidItem for a picture, or an instruction that is not taken."""
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise InvalidItem("this model embeds text only, and the item holds a picture")
        if not any(texts):
            raise InvalidItem("the item is empty")
        written = Written(self._tokenizer)
        if instruction:
            if self._template is None:
                raise InvalidItem("this model takes no instruction")
            written.add_text(self._template.replace("{instruction}", instruction))
        written.add_users_text("".join(texts))
        return written.sequence(max_tokens)
