"""From what a caller sends to items: one parser for HTTP documents and for handle calls."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd.deployments.errors import RequestError

_DATA_URI = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?:;[\w-]+=[^;,]*)*(?P<base64>;base64)?,", re.ASCII)
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_ITEM_FIELDS = {"text", "image", "content", "instruction"}
_CONTENT_TYPES = ("text", "image_url")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An encoded picture, as received. `param` is its path in the request, for errors."""

    data: bytes
    param: str


@dataclass(frozen=True, slots=True)
class Item:
    """One input: texts and pictures in prompt order. `param` is its path in the request, for errors."""

    parts: tuple[str | ImagePart, ...]
    param: str
    instruction: str | None = None


def parse_input(value: object, *, max_items: int, instruction: str | None = None) -> list[Item]:
    """Items of a request's `input`: a string, an item, or a list of these.

    An item is `{"text"?, "image"?, "instruction"?}` (pictures come before the text) or
    `{"content": [...], "instruction"?}` (the order given). A picture is bytes, a data URI or bare base64.
    `instruction` is the default of items that bring none. Raises RequestError naming the item.
    """
    if isinstance(value, str | Mapping):
        return [_parse_item(value, "input", instruction)]
    if not _is_list(value):
        raise RequestError(f"expected a string, an item or a list of these, got {_kind(value)}", "input")
    assert isinstance(value, Sequence)
    if not value:
        raise RequestError("the list is empty", "input")
    if len(value) > max_items:
        raise RequestError(f"{len(value)} items, and at most {max_items} are taken", "input")
    return [_parse_item(item, f"input[{i}]", instruction) for i, item in enumerate(value)]


def _parse_item(value: object, param: str, instruction: str | None) -> Item:
    if isinstance(value, str):
        return Item((_text(value, param),), param, instruction)
    if not isinstance(value, Mapping):
        raise RequestError(f"expected a string or an item, got {_kind(value)}", param)
    if unknown := sorted(str(name) for name in value.keys() - _ITEM_FIELDS):
        raise RequestError(f"unknown fields: {', '.join(unknown)}", param)
    own = value.get("instruction")
    if own is not None:
        instruction = _text(own, f"{param}.instruction")
    if (content := value.get("content")) is not None:
        if value.get("text") is not None or value.get("image") is not None:
            raise RequestError("`content` stands alone: not beside `text` or `image`", param)
        parts = _parse_content(content, f"{param}.content")
    else:
        parts = [*_parse_images(value.get("image"), f"{param}.image")]
        if (text := value.get("text")) is not None:
            parts.append(_text(text, f"{param}.text"))
    if not parts:
        raise RequestError("the item has neither text nor image", param)
    return Item(tuple(parts), param, instruction)


def _parse_images(value: object, param: str) -> list[str | ImagePart]:
    if value is None:
        return []
    if not _is_list(value):
        return [_image(value, param)]
    assert isinstance(value, Sequence)
    return [_image(image, f"{param}[{i}]") for i, image in enumerate(value)]


def _parse_content(value: object, param: str) -> list[str | ImagePart]:
    if not _is_list(value):
        raise RequestError(f"expected a list of parts, got {_kind(value)}", param)
    assert isinstance(value, Sequence)
    return [_parse_content_part(part, f"{param}[{i}]") for i, part in enumerate(value)]


def _parse_content_part(part: object, param: str) -> str | ImagePart:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _CONTENT_TYPES:
        raise RequestError(f"expected a part of type {' or '.join(_CONTENT_TYPES)}", param)
    if unknown := sorted(str(name) for name in part.keys() - {"type", kind}):
        raise RequestError(f"unknown fields: {', '.join(unknown)}", param)
    if kind == "text":
        return _text(part.get("text"), f"{param}.text")
    image_url = part.get("image_url")
    if isinstance(image_url, Mapping):
        if unknown := sorted(str(name) for name in image_url.keys() - {"url", "detail"}):
            raise RequestError(f"unknown fields: {', '.join(unknown)}", f"{param}.image_url")
        if image_url.get("detail") not in (None, "auto"):
            raise RequestError("only `auto` is taken", f"{param}.image_url.detail")
        image_url = image_url.get("url")
    if isinstance(image_url, str) and not image_url.startswith("data:"):
        raise RequestError(_no_url(image_url), f"{param}.image_url.url")
    return _image(image_url, f"{param}.image_url.url")


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"expected text, got {_kind(value)}", param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text holds a lone surrogate at character {error.start}", param) from None
    return value


def _image(value: object, param: str) -> ImagePart:
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, str):
        data = _decode_image(value, param)
    else:
        raise RequestError(f"expected a picture, got {_kind(value)}", param)
    if not data:
        raise RequestError("the picture is empty", param)
    return ImagePart(data, param)


def _decode_image(value: str, param: str) -> bytes:
    if value.startswith("data:"):
        if not (head := _DATA_URI.match(value)) or not head["base64"]:
            raise RequestError("a data URI must be `data:<type>;base64,<data>`", param)
        value = value[head.end() :]
    elif _URL.match(value):
        raise RequestError(_no_url(value), param)
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("not valid base64", param) from None


def _no_url(value: str) -> str:
    if _URL.match(value):
        return "picture URLs are not fetched by this server: send a data URI"
    return "expected a data URI"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
