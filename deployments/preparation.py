"""From items to token sequences and pictures with keys: all of it without weights and without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epd.cache.keys import media_key
from epd.cache.types import MediaGrid
from epd.deployments.errors import RequestError
from epd.deployments.items import ImagePart, Item
from epd.deployments.messages import MediaMessage, MediaRef, SequenceMessage
from epd.deployments.settings import LimitSettings
from epd.models.errors import InvalidItem
from epd.models.images import ImagePreprocessor
from epd.models.prompt import Prompt


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request's sequences in order, its distinct pictures by key, and where each was first named."""

    sequences: tuple[SequenceMessage, ...]
    media: dict[str, MediaMessage]
    params: dict[str, str]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)


class ItemPreparer:
    """Tokenises items and names their pictures. Pure CPU work: call it off the event loop.

    namespace: of the rows that this application's encoders make.
    images: None for a model that takes text only.
    """

    def __init__(
        self, prompt: Prompt, images: ImagePreprocessor | None, namespace: str, limits: LimitSettings
    ) -> None:
        self._prompt = prompt
        self._images = images
        self._namespace = namespace
        self._limits = limits

    def prepare(self, items: Sequence[Item], salt: str | None = None) -> PreparedRequest:
        """Raises RequestError that names the item and the limit."""
        media: dict[str, MediaMessage] = {}
        params: dict[str, str] = {}
        sequences = []
        num_tokens = 0
        for item in items:
            sequence = self._prepare_item(item, salt, media, params)
            num_tokens += sequence.num_tokens
            if num_tokens > self._limits.max_tokens_per_request:
                raise RequestError(
                    f"the request has more than {self._limits.max_tokens_per_request} tokens: split it", "input"
                )
            sequences.append(sequence)
        return PreparedRequest(tuple(sequences), media, params)

    def _prepare_item(
        self, item: Item, salt: str | None, media: dict[str, MediaMessage], params: dict[str, str]
    ) -> SequenceMessage:
        parts: list[str | MediaGrid] = []
        keys: list[str] = []
        for part in item.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            message = self._prepare_image(part, salt)
            parts.append(MediaGrid(*message.grid))
            keys.append(message.key)
            media.setdefault(message.key, message)
            params.setdefault(message.key, part.param)
        try:
            sequence = self._prompt.render(parts, item.instruction)
        except InvalidItem as error:
            raise RequestError(str(error), item.param) from None
        if sequence.num_tokens > self._limits.max_tokens_per_item:
            raise RequestError(
                f"the item has {sequence.num_tokens} tokens and at most "
                f"{self._limits.max_tokens_per_item} are taken",
                item.param,
            )
        refs = tuple(
            MediaRef(key, (span.grid.t, span.grid.h, span.grid.w), span.start, span.length)
            for key, span in zip(keys, sequence.spans, strict=True)
        )
        return SequenceMessage(sequence.token_ids.astype(np.int32), refs, salt)

    def _prepare_image(self, part: ImagePart, salt: str | None) -> MediaMessage:
        if self._images is None:
            raise RequestError("this model takes text only", part.param)
        try:
            grid = self._images.grid(part.data)
        except InvalidItem as error:
            raise RequestError(str(error), part.param) from None
        key = media_key(self._namespace, part.data, salt=salt)
        return MediaMessage(str(key), (grid.t, grid.h, grid.w), part.data)
