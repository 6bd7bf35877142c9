"""vLLM's `messages`, parsed into one item."""

from __future__ import annotations

from typing import Any

import pytest

from epd.deployments.conversation import parse_messages
from epd.deployments.errors import RequestError
from epd.deployments.items import ImagePart, Item

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}


def message(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def parse(*messages: object, **options: Any) -> Item:
    (item,) = parse_messages(list(messages), **options)
    return item


def test_the_users_message_is_the_item() -> None:
    """Texts and pictures of the user's message are the item's parts, in order."""
    item = parse(message("user", [{"type": "text", "text": "a"}, IMAGE]))
    assert item.parts == ("a", ImagePart(b"ABC", "messages[0].content[1].image_url.url"))
    assert item.instruction is None


def test_the_systems_message_is_the_instruction() -> None:
    """As text or as text parts, and over the request's own."""
    user = message("user", "a")
    assert parse(message("system", "find"), user, instruction="other").instruction == "find"
    parts = [{"type": "text", "text": "find "}, {"type": "text", "text": "it"}]
    assert parse(message("system", parts), user).instruction == "find it"
    assert parse(user, instruction="other").instruction == "other"


def test_an_empty_message_of_the_assistant_asks_for_the_models_own_prompt() -> None:
    """What vLLM's example for this model sends is taken as it is."""
    item = parse(
        message("system", [{"type": "text", "text": "find"}]),
        message("user", [IMAGE, {"type": "text", "text": ""}]),
        message("assistant", [{"type": "text", "text": ""}]),
        continue_final_message=True,
    )
    assert (item.instruction, item.parts[1]) == ("find", "")


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([], {}, "messages"),
        (["a"], {}, "messages[0]"),
        ([message("system", "a")], {}, "messages"),
        ([message("user", "a"), message("user", "b")], {}, "messages"),
        ([message("user", "a"), message("system", "b")], {}, "messages"),
        ([message("tool", "a")], {}, "messages"),
        ([message("user", "a")] * 9, {}, "messages"),
        ([message("user", None)], {}, "messages[0].content"),
        ([message("user", "")], {}, "messages"),
        ([{**message("user", "a"), "name": "b"}], {}, "messages[0]"),
        ([message("system", [IMAGE]), message("user", "a")], {}, "messages[0].content"),
        ([message("user", "a"), message("assistant", "")], {}, "continue_final_message"),
        ([message("user", "a")], {"continue_final_message": True}, "continue_final_message"),
        (
            [message("user", "a"), message("assistant", "b")],
            {"continue_final_message": True},
            "messages[1].content",
        ),
    ],
)
def test_other_conversations_are_refused(messages: list[Any], options: dict[str, Any], param: str) -> None:
    """A conversation that the prompt cannot hold is a mistake that names the message."""
    with pytest.raises(RequestError) as raised:
        parse(*messages, **options)
    assert raised.value.param == param


def test_messages_must_be_a_list() -> None:
    """A single message is not a conversation."""
    with pytest.raises(RequestError, match="list of messages, got dict"):
        parse_messages(message("user", "a"))
