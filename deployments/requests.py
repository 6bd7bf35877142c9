"""From a body's document to an embedding request of items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from epd.deployments.content import read_text
from epd.deployments.conversation import parse_messages
from epd.deployments.documents import read_document, shown
from epd.deployments.errors import MalformedBody, RequestError, UnsupportedField
from epd.deployments.items import Item, PixelRequest, parse_input
from epd.deployments.wire import WHY_REFUSED, EmbeddingRequestBody, ProcessorKwargs

_KWARGS = "mm_processor_kwargs"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """One request, checked. `model`: what the caller called it. `cache_salt`: the caller's own."""

    items: tuple[Item, ...]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    cache_salt: str | None = None


def read_request(body: bytes | bytearray, kind: str, *, max_items: int, allow_urls: bool) -> EmbeddingRequest:
    """The request in a body of media type `kind`. The body is parsed once. Call it off the event loop.

    Raises RequestError naming the field or the item.
    """
    document = read_document(body, kind)
    if not isinstance(document, dict):
        raise MalformedBody("the body must be one object")
    fields = _check(document)
    for name in ("instruction", "cache_salt", "model", "user"):
        if (text := getattr(fields, name)) is not None:
            read_text(text, name)
    return EmbeddingRequest(
        tuple(_items(document, fields, max_items, allow_urls)),
        fields.model,
        fields.dimensions,
        fields.encoding_format or "float",
        fields.cache_salt,
    )


def _items(
    document: dict[str, object], fields: EmbeddingRequestBody, max_items: int, allow_urls: bool
) -> list[Item]:
    truncate = fields.truncate == "end"
    pixels = _pixels(fields.mm_processor_kwargs)
    messages = document.get("messages")
    if messages is None:
        if fields.continue_final_message:
            raise UnsupportedField(WHY_REFUSED["continue_final_message"], "continue_final_message")
        return parse_input(
            document.get("input"),
            max_items=max_items,
            instruction=fields.instruction,
            truncate=truncate,
            allow_urls=allow_urls,
            pixels=pixels,
        )
    if document.get("input") is not None:
        raise RequestError("a request has `input` or `messages`, not both", "messages")
    if fields.continue_final_message and fields.add_generation_prompt:
        raise UnsupportedField("it contradicts `continue_final_message`", "add_generation_prompt")
    return parse_messages(
        messages,
        instruction=fields.instruction,
        truncate=truncate,
        allow_urls=allow_urls,
        continue_final_message=fields.continue_final_message,
        pixels=pixels,
    )


def _pixels(asked: ProcessorKwargs | None) -> PixelRequest | None:
    if asked is None:
        return None
    if asked.size is None:
        return PixelRequest(asked.min_pixels, asked.max_pixels)
    if asked.min_pixels is not None or asked.max_pixels is not None:
        raise RequestError("`size` stands alone: not beside `min_pixels` or `max_pixels`", _KWARGS)
    return PixelRequest(asked.size.shortest_edge, asked.size.longest_edge)


def _check(document: dict[str, object]) -> EmbeddingRequestBody:
    if unknown := sorted(document.keys() - EmbeddingRequestBody.model_fields.keys()):
        raise UnsupportedField("unknown field", shown(unknown[0]))
    try:
        return EmbeddingRequestBody.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = str(first["loc"][0])
    if name == _KWARGS and first["type"] != "extra_forbidden":
        raise RequestError(first["msg"], ".".join(map(str, first["loc"])))
    if name in WHY_REFUSED:
        raise UnsupportedField(WHY_REFUSED[name], name)
    raise RequestError(first["msg"], name)
