"""From items to token sequences and pictures with keys: all of it without weights and without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from epd.cache.keys import media_key
from epd.cache.types import MediaGrid
from epd.deployments.errors import InputTooLong, RequestError
from epd.deployments.items import ImagePart, Item, PixelRequest
from epd.deployments.messages import MediaMessage, MediaRef, SequenceMessage
from epd.deployments.settings import LimitSettings
from epd.models.base import Family
from epd.models.errors import InvalidItem
from epd.models.image_settings import PixelBounds
from epd.models.images import ImagePreprocessor
from epd.models.prompt import Prompt, from_token_ids
from epd.models.types import TokenSequence

_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What the model says of token ids: how many there are, which stand for media, how many it takes."""

    vocab_size: int
    max_tokens: int
    placeholders: frozenset[int] = frozenset()

    @classmethod
    def of(cls, family: Family, config: Any) -> TokenRules:
        """Those of a family; `config` is transformers' configuration of its checkpoint."""
        ids = (getattr(config, name, None) for name in _PLACEHOLDERS)
        return cls(family.vocab_size, family.max_tokens, frozenset(each for each in ids if each is not None))


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
        self,
        prompt: Prompt,
        images: ImagePreprocessor | None,
        namespace: str,
        limits: LimitSettings,
        rules: TokenRules,
    ) -> None:
        self._prompt = prompt
        self._images = images
        self._namespace = namespace
        self._limits = limits
        self._rules = rules
        self._max_tokens = min(limits.max_tokens_per_item, rules.max_tokens)

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
                raise InputTooLong(
                    f"the request has {num_tokens} tokens up to {item.param}, and at most "
                    f"{self._limits.max_tokens_per_request} are taken: split it",
                    "input",
                )
            sequences.append(sequence)
        return PreparedRequest(tuple(sequences), media, params)

    def _prepare_item(
        self, item: Item, salt: str | None, media: dict[str, MediaMessage], params: dict[str, str]
    ) -> SequenceMessage:
        if item.token_ids is not None:
            return SequenceMessage(self._check_ids(item, item.token_ids).token_ids.astype(np.int32), (), salt)
        parts: list[str | MediaGrid] = []
        keys: list[str] = []
        self._check_text(item)
        bounds = self._resolve(item.pixels)
        for part in item.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            assert isinstance(part, ImagePart), "URLs are fetched before"
            message = self._prepare_image(part, bounds, salt)
            parts.append(MediaGrid(*message.grid))
            keys.append(message.key)
            media.setdefault(message.key, message)
            params.setdefault(message.key, part.param)
        self._check_pictures(item, [part for part in parts if isinstance(part, MediaGrid)])
        sequence = self._render(item, parts)
        refs = tuple(
            MediaRef(key, (span.grid.t, span.grid.h, span.grid.w), span.start, span.length)
            for key, span in zip(keys, sequence.spans, strict=True)
        )
        return SequenceMessage(sequence.token_ids.astype(np.int32), refs, salt)

    def _render(self, item: Item, parts: Sequence[str | MediaGrid]) -> TokenSequence:
        limit = self._max_tokens if item.truncate else None
        try:
            sequence = self._prompt.render(parts, item.instruction, max_tokens=limit)
        except InvalidItem as error:
            kind = InputTooLong if self._fits_without_limit(item, parts) else RequestError
            raise kind(str(error), item.param) from None
        if sequence.num_tokens > self._max_tokens:
            raise self._too_long(sequence.num_tokens, item.param)
        return sequence

    def _fits_without_limit(self, item: Item, parts: Sequence[str | MediaGrid]) -> bool:
        """Whether an item that could not be rendered was refused for its length alone."""
        try:
            self._prompt.render(parts, item.instruction)
        except InvalidItem:
            return False
        return True

    def _check_text(self, item: Item) -> None:
        """Bounds the work of the tokenizer before it starts."""
        num_chars = sum(len(part) for part in item.parts if isinstance(part, str)) + len(
            item.instruction or ""
        )
        if num_chars > self._limits.max_text_chars_per_item:
            raise InputTooLong(
                f"the item's text has {num_chars} characters and at most "
                f"{self._limits.max_text_chars_per_item} are taken",
                item.param,
            )

    def _check_pictures(self, item: Item, grids: Sequence[MediaGrid]) -> None:
        """Bounds the placeholders before they are written out."""
        if self._images is None:
            return
        num_tokens = sum(grid.num_tokens(self._images.settings.merge_size) for grid in grids)
        if num_tokens > self._max_tokens:
            raise InputTooLong(
                f"the item's pictures alone have {num_tokens} tokens and at most {self._max_tokens} are "
                "taken",
                item.param,
            )

    def _check_ids(self, item: Item, token_ids: tuple[int, ...]) -> TokenSequence:
        """Ids as the caller sent them: no template, so `truncate` takes from their end."""
        if len(token_ids) > self._max_tokens:
            if not item.truncate:
                raise self._too_long(len(token_ids), item.param)
            token_ids = token_ids[: self._max_tokens]
        if media := self._rules.placeholders.intersection(token_ids):
            raise RequestError(
                f"the token id {min(media)} stands for media: send pictures as items", item.param
            )
        try:
            return from_token_ids(token_ids, self._rules.vocab_size)
        except InvalidItem as error:
            raise RequestError(str(error), item.param) from None

    def _resolve(self, asked: PixelRequest | None) -> PixelBounds | None:
        """The bounds that a request asks for; None for the checkpoint's own, so that rows are shared."""
        if asked is None or self._images is None:
            return None
        own = self._images.settings.bounds
        bounds = PixelBounds(
            own.min_pixels if asked.min_pixels is None else asked.min_pixels,
            own.max_pixels if asked.max_pixels is None else asked.max_pixels,
        )
        if not bounds.min_pixels <= bounds.max_pixels <= own.max_pixels:
            raise RequestError(
                f"pictures would have {bounds.min_pixels} to {bounds.max_pixels} pixels: the least must not "
                f"be over the most, and that not over the model's own {own.max_pixels}",
                "mm_processor_kwargs",
            )
        return None if bounds == own else bounds

    def _prepare_image(self, part: ImagePart, bounds: PixelBounds | None, salt: str | None) -> MediaMessage:
        if self._images is None:
            raise RequestError("this model takes text only", part.param)
        try:
            grid = self._images.grid(part.data, bounds)
        except InvalidItem as error:
            raise RequestError(str(error), part.param) from None
        fingerprint = "" if bounds is None else f"pixels {bounds.min_pixels} {bounds.max_pixels}"
        key = media_key(self._namespace, part.data, salt=salt, preprocessing=fingerprint)
        return MediaMessage(str(key), (grid.t, grid.h, grid.w), part.data, pixel_bounds=bounds)

    def _too_long(self, num_tokens: int, param: str) -> InputTooLong:
        return InputTooLong(
            f"the item has {num_tokens} tokens and at most {self._max_tokens} are taken", param
        )
