"""What a caller sends, parsed into items."""

from __future__ import annotations

import base64

import pytest

from epd.deployments.errors import RequestError
from epd.deployments.items import ImagePart, Item, parse_input

PNG = b"\x89PNG picture"
BASE64 = base64.b64encode(PNG).decode()


def parse(value: object, **options: object) -> list[Item]:
    return parse_input(value, max_items=4, **options)  # type: ignore[arg-type]


def test_string_and_list_of_strings_are_items() -> None:
    """A string is one item; a list of strings is an item each, in order."""
    assert [item.parts for item in parse("a")] == [("a",)]
    assert [item.parts for item in parse(["a", "b"])] == [("a",), ("b",)]


@pytest.mark.parametrize("image", [PNG, BASE64, f"data:image/png;base64,{BASE64}", f"data:;base64,{BASE64}"])
def test_picture_forms_give_the_same_bytes(image: object) -> None:
    """Bytes, bare base64 and data URIs are the same picture."""
    (item,) = parse({"image": image})
    assert item.parts == (ImagePart(PNG, "input.image"),)


def test_separate_fields_put_pictures_before_text() -> None:
    """With `text` and `image` fields the pictures come first."""
    (item,) = parse([{"text": "t", "image": [PNG, BASE64]}])
    assert item.parts == (ImagePart(PNG, "input[0].image[0]"), ImagePart(PNG, "input[0].image[1]"), "t")


def test_content_keeps_the_order_given() -> None:
    """In `content` texts and pictures stay where the caller put them."""
    uri = f"data:image/png;base64,{BASE64}"
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "text", "text": "b"},
    ]
    (item,) = parse({"content": content})
    assert item.parts == ("a", ImagePart(PNG, "input.content[1].image_url.url"), "b")


def test_an_items_own_instruction_wins() -> None:
    """`instruction` of the request is a default for items without one."""
    items = parse([{"text": "a", "instruction": "own"}, "b"], instruction="default")
    assert [item.instruction for item in items] == ["own", "default"]


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        (None, "input", "nothing"),
        ([], "input", "empty"),
        (["a"] * 5, "input", "5 items, and at most 4"),
        ([3], "input[0]", "int"),
        ({"txt": "a"}, "input", "txt"),
        ([{"text": None}], "input[0]", "neither"),
        ([{"text": 3}], "input[0].text", "int"),
        (["a", {"image": "%%%"}], "input[1].image", "base64"),
        ([{"image": ""}], "input[0].image", "empty"),
        ([{"image": "https://example.org/a.png"}], "input[0].image", "not fetched"),
        ([{"image": "data:image/png,raw"}], "input[0].image", "base64"),
        ([{"content": [{"type": "audio"}]}], "input[0].content[0]", "image_url"),
        ([{"content": [], "text": "a"}], "input[0]", "alone"),
        ([{"text": "\ud800"}], "input[0].text", "surrogate"),
    ],
)
def test_a_wrong_item_is_named(value: object, param: str, words: str) -> None:
    """Each mistake is an error that names the item's path and what is wrong."""
    with pytest.raises(RequestError, match=words) as raised:
        parse(value)
    assert raised.value.param == param
