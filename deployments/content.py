"""Texts and `content` lists: what items and conversations have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from epd.deployments.documents import shown
from epd.deployments.errors import RequestError, UnsupportedField
from epd.deployments.pictures import ImagePart, ImageUrl, kind, read_picture

Part = str | ImagePart | ImageUrl
_PART_TYPES = ("text", "image_url")


def read_content(value: object, param: str, *, allow_urls: bool) -> list[Part]:
    """Parts of a `content` list, in the order given. Raises RequestError naming the part."""
    if not is_list(value):
        raise RequestError(f"expected a list of parts, got {kind(value)}", param)
    return [_read_part(part, f"{param}[{i}]", allow_urls) for i, part in enumerate(value)]


def read_text(value: object, param: str) -> str:
    """A text that is valid Unicode. Raises RequestError otherwise."""
    if not isinstance(value, str):
        raise RequestError(f"expected text, got {kind(value)}", param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text holds a lone surrogate at character {error.start}", param) from None
    return value


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether the value is a list to a caller: texts and bytes are not."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def refuse_unknown(value: Mapping[object, object], known: frozenset[str], param: str) -> None:
    """Raises UnsupportedField naming the fields that are not known."""
    if unknown := sorted(shown(name) for name in value.keys() - known):
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise UnsupportedField(f"unknown fields: {', '.join(unknown[:3])}{more}", param)


def _read_part(part: object, param: str, allow_urls: bool) -> Part:
    if not isinstance(part, Mapping) or (name := part.get("type")) not in _PART_TYPES:
        raise RequestError(f"expected a part of type {' or '.join(_PART_TYPES)}", param)
    refuse_unknown(part, frozenset({"type", name}), param)
    if name == "text":
        return read_text(part.get("text"), f"{param}.text")
    picture = part.get("image_url")
    if isinstance(picture, Mapping):
        refuse_unknown(picture, frozenset({"url", "detail"}), f"{param}.image_url")
        if picture.get("detail") not in (None, "auto"):
            raise UnsupportedField("only `auto` is taken", f"{param}.image_url.detail")
        picture = picture.get("url")
    return read_picture(picture, f"{param}.image_url.url", allow_urls=allow_urls, bare=False)
