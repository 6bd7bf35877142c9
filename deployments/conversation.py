"""The `messages` form of a request, as vLLM's clients send it: one conversation is one item."""

from __future__ import annotations

from collections.abc import Mapping

from epd.deployments.content import Part, is_list, read_content, read_text, refuse_unknown
from epd.deployments.errors import RequestError, UnsupportedField
from epd.deployments.items import Item, ItemParser, PixelRequest
from epd.deployments.pictures import kind

_FIELDS = frozenset({"role", "content"})
_SHAPES = (("user",), ("system", "user"), ("user", "assistant"), ("system", "user", "assistant"))


def parse_messages(
    value: object,
    *,
    instruction: str | None = None,
    truncate: bool = False,
    allow_urls: bool = False,
    continue_final_message: bool | None = None,
    pixels: PixelRequest | None = None,
) -> list[Item]:
    """The one item of `messages`: the user's message is its content, the system's text its instruction.

    The prompt is the model's own: it ends with the opening of the assistant's turn. That is what an empty
    message of the assistant with `continue_final_message` asks for, so this form is taken too.
    Raises RequestError for any other conversation.
    """
    if not is_list(value):
        raise RequestError(f"expected a list of messages, got {kind(value)}", "messages")
    roles, contents = [], []
    for i, message in enumerate(value[:4]):
        param = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"expected a message, got {kind(message)}", param)
        refuse_unknown(message, _FIELDS, param)
        roles.append(message.get("role"))
        contents.append(_content(message.get("content"), f"{param}.content", allow_urls))
    if tuple(roles) not in _SHAPES:
        raise RequestError(
            "expected at most one message of the system, one of the user, and at most an empty one of the "
            "assistant, in this order",
            "messages",
        )
    if (roles[-1] == "assistant") != bool(continue_final_message):
        raise RequestError(
            "`continue_final_message` goes with a last, empty message of the assistant, and only with it",
            "continue_final_message",
        )
    if roles[-1] == "assistant" and any(contents[-1]):
        raise UnsupportedField("the assistant's message must be empty", f"messages[{len(roles) - 1}].content")
    system = _instruction(contents[0]) if roles[0] == "system" else None
    parser = ItemParser(instruction=instruction, truncate=truncate, allow_urls=allow_urls, pixels=pixels)
    return [parser.item(contents[roles.index("user")], "messages", system)]


def _content(value: object, param: str, allow_urls: bool) -> list[Part]:
    if isinstance(value, str):
        return [read_text(value, param)]
    return read_content(value, param, allow_urls=allow_urls)


def _instruction(content: list[Part]) -> str:
    texts = [part for part in content if isinstance(part, str)]
    if len(texts) < len(content):
        raise RequestError("the system's message is the instruction: text only", "messages[0].content")
    return "".join(texts)
