"""From what a caller sends to items: one parser for HTTP documents and for handle calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from epd.deployments.content import Part, is_list, read_content, read_text, refuse_unknown
from epd.deployments.errors import RequestError
from epd.deployments.pictures import ImagePart, ImageUrl, kind, read_picture

__all__ = ["ImagePart", "ImageUrl", "Item", "ItemParser", "Part", "PixelRequest", "parse_input"]

_ITEM_FIELDS = frozenset({"text", "image", "content", "instruction"})
_LARGEST_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class PixelRequest:
    """Least and most pixels of a resized picture; None for the checkpoint's own."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One input: texts and pictures in prompt order, or the caller's own token ids instead of them.

    `param` is its path in the request, for errors. `truncate`: shorten the user's text when the item is too
    long, instead of refusing it. `pixels`: how its pictures are resized, where the request says so.
    """

    parts: tuple[Part, ...]
    param: str
    instruction: str | None = None
    truncate: bool = False
    token_ids: tuple[int, ...] | None = None
    pixels: PixelRequest | None = None


def parse_input(
    value: object,
    *,
    max_items: int,
    instruction: str | None = None,
    truncate: bool = False,
    allow_urls: bool = False,
    pixels: PixelRequest | None = None,
) -> list[Item]:
    """Items of a request's `input`: a string, an item, token ids, or a list of these.

    An item is `{"text"?, "image"?, "instruction"?}` (pictures come before the text) or
    `{"content": [...], "instruction"?}` (the order given). A picture is bytes, a data URI, bare base64, or
    with `allow_urls` an http(s) URL. `instruction` is the default of items that bring none.
    Raises RequestError naming the item. Call it off the event loop: pictures are decoded from base64.
    """
    parser = ItemParser(instruction=instruction, truncate=truncate, allow_urls=allow_urls, pixels=pixels)
    if isinstance(value, str | Mapping):
        return [parser.parse(value, "input")]
    if not is_list(value):
        raise RequestError(f"expected a string, an item or a list of these, got {kind(value)}", "input")
    if not value:
        raise RequestError("the list is empty", "input")
    if _is_int(value[0]):
        return [parser.parse(value, "input")]
    if len(value) > max_items:
        raise RequestError(f"{len(value)} items, and at most {max_items} are taken", "input")
    return [parser.parse(item, f"input[{i}]") for i, item in enumerate(value)]


@dataclass(frozen=True, slots=True)
class ItemParser:
    """Makes items under one request's defaults."""

    instruction: str | None
    truncate: bool
    allow_urls: bool
    pixels: PixelRequest | None = None

    def parse(self, value: object, param: str) -> Item:
        """One item, whose path in the request is `param`. Raises RequestError."""
        if isinstance(value, str):
            return self.item([read_text(value, param)], param)
        if isinstance(value, Mapping):
            return self._parse_mapping(value, param)
        if is_list(value):
            return self._parse_token_ids(value, param)
        raise RequestError(f"expected a string, an item or token ids, got {kind(value)}", param)

    def item(self, parts: Sequence[Part], param: str, instruction: str | None = None) -> Item:
        """An item of these parts; `instruction` is its own. Raises RequestError when it is empty."""
        if not any(parts):
            raise RequestError("the item has neither text nor image", param)
        own = self.instruction if instruction is None else instruction
        return Item(tuple(parts), param, own, self.truncate, pixels=self.pixels)

    def _parse_mapping(self, value: Mapping[object, object], param: str) -> Item:
        refuse_unknown(value, _ITEM_FIELDS, param)
        text, image, content = value.get("text"), value.get("image"), value.get("content")
        own = value.get("instruction")
        instruction = None if own is None else read_text(own, f"{param}.instruction")
        if content is not None:
            if text is not None or image is not None:
                raise RequestError("`content` stands alone: not beside `text` or `image`", param)
            return self.item(
                read_content(content, f"{param}.content", allow_urls=self.allow_urls), param, instruction
            )
        parts: list[Part] = [*self._parse_images(image, f"{param}.image")]
        if text is not None:
            parts.append(read_text(text, f"{param}.text"))
        return self.item(parts, param, instruction)

    def _parse_images(self, value: object, param: str) -> list[ImagePart | ImageUrl]:
        if value is None:
            return []
        if not is_list(value):
            return [read_picture(value, param, allow_urls=self.allow_urls)]
        return [
            read_picture(image, f"{param}[{i}]", allow_urls=self.allow_urls) for i, image in enumerate(value)
        ]

    def _parse_token_ids(self, value: Sequence[object], param: str) -> Item:
        """Token ids bypass the template, so nothing that the template would hold can be honoured."""
        if self.instruction is not None:
            raise RequestError("token ids bypass the template, so `instruction` cannot apply to them", param)
        token_ids = []
        for i, token in enumerate(value):
            if not _is_int(token):
                raise RequestError(f"expected a token id, got {kind(token)}", f"{param}[{i}]")
            if not 0 <= token <= _LARGEST_TOKEN_ID:
                raise RequestError(f"a token id must be between 0 and {_LARGEST_TOKEN_ID}", f"{param}[{i}]")
            token_ids.append(token)
        if not token_ids:
            raise RequestError("the list of token ids is empty", param)
        return Item((), param, None, self.truncate, tuple(token_ids))


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
