"""What a caller sends, parsed into items."""

from __future__ import annotations

import base64

import pytest

from epd.deployments.errors import RequestError, UnsupportedField, UrlNotAllowed
from epd.deployments.items import ImagePart, ImageUrl, Item, parse_input

PNG = b"\x89PNG picture"
BASE64 = base64.b64encode(PNG).decode()


def parse(value: object, **options: object) -> list[Item]:
    return parse_input(value, max_items=4, **options)  # type: ignore[arg-type]


def test_string_and_list_of_strings_are_items() -> None:
    """A string is one item; a list of strings is an item each, in order."""
    assert [item.parts for item in parse("a")] == [("a",)]
    assert [item.parts for item in parse(["a", "b"])] == [("a",), ("b",)]


def test_a_list_of_ids_is_one_item_and_a_list_of_lists_an_item_each() -> None:
    """`[int]` is one item of token ids; `[[int]]` is one each; other items may stand beside them."""
    assert [item.token_ids for item in parse([1, 2])] == [(1, 2)]
    assert [item.token_ids for item in parse([[1, 2], [3], "a"])] == [(1, 2), (3,), None]


def test_ids_are_not_counted_as_items() -> None:
    """The limit of items does not bound the ids of one item."""
    assert len(parse(list(range(100)))) == 1


@pytest.mark.parametrize("image", [PNG, BASE64, f"data:image/png;base64,{BASE64}", f"data:;base64,{BASE64}"])
def test_picture_forms_give_the_same_bytes(image: object) -> None:
    """Bytes, bare base64 and data URIs are the same picture."""
    (item,) = parse({"image": image})
    assert item.parts == (ImagePart(PNG, "input.image"),)


def test_a_data_uri_may_carry_parameters_and_capitals() -> None:
    """Scheme and `base64` are case-insensitive, and parameters are skipped."""
    (item,) = parse({"image": f"DATA:image/png;name=a.png;BASE64,{BASE64}"})
    assert item.parts == (ImagePart(PNG, "input.image"),)


def test_a_large_picture_is_decoded_whole() -> None:
    """Base64 that is decoded in several steps gives the same bytes."""
    data = bytes(range(256)) * 5000
    (item,) = parse({"image": base64.b64encode(data).decode()})
    assert item.parts == (ImagePart(data, "input.image"),)


def test_padding_inside_a_large_picture_is_refused() -> None:
    """Padding at the end of a decoding step is no end of the picture."""
    step = 512 * 1024
    with pytest.raises(RequestError, match="base64"):
        parse({"image": "A" * (step - 2) + "==" + "AAAA"})


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


def test_urls_are_left_to_be_fetched_where_allowed() -> None:
    """With `allow_urls` an http(s) URL becomes a part to fetch, in both forms."""
    url = "https://example.org/a.png"
    (one,) = parse({"image": url}, allow_urls=True)
    (two,) = parse({"content": [{"type": "image_url", "image_url": url}]}, allow_urls=True)
    assert one.parts == (ImageUrl(url, "input.image"),)
    assert two.parts == (ImageUrl(url, "input.content[0].image_url.url"),)


@pytest.mark.parametrize(
    ("url", "allow", "words"),
    [
        ("https://example.org/a.png", False, "not fetched"),
        ("file:///etc/passwd", True, "http or https"),
        ("FILE:/etc/passwd", True, "http or https"),
        ("ftp://example.org/a.png", True, "http or https"),
        ("gopher:x", True, "http or https"),
    ],
)
def test_urls_that_are_not_fetched_are_refused(url: str, allow: bool, words: str) -> None:
    """URLs are off by default, and never of another scheme than http and https."""
    for value in ({"image": url}, {"content": [{"type": "image_url", "image_url": {"url": url}}]}):
        with pytest.raises(UrlNotAllowed, match=words):
            parse(value, allow_urls=allow)


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        (None, "input", "nothing"),
        ([], "input", "empty"),
        ("", "input", "neither"),
        (["a"] * 5, "input", "5 items, and at most 4"),
        ([True], "input[0]", "bool"),
        ([1, "a"], "input[1]", "token id, got str"),
        ([[1], [2, 2.0]], "input[1][1]", "token id, got float"),
        ([[1, True]], "input[0][1]", "token id, got bool"),
        ([[]], "input[0]", "ids is empty"),
        ([-1], "input[0]", "between 0 and"),
        ([[10**30]], "input[0][0]", "between 0 and"),
        ([1.5], "input[0]", "float"),
        ([{"text": None}], "input[0]", "neither"),
        ([{"text": "", "image": []}], "input[0]", "neither"),
        ([{"content": []}], "input[0]", "neither"),
        ([{"content": "a"}], "input[0].content", "list of parts"),
        ([{"text": 3}], "input[0].text", "int"),
        ([{"image": 3}], "input[0].image", "int"),
        (["a", {"image": "%%%"}], "input[1].image", "base64"),
        ([{"image": "é"}], "input[0].image", "base64"),
        ([{"image": "QQ"}], "input[0].image", "base64"),
        ([{"image": ""}], "input[0].image", "empty"),
        ([{"image": b""}], "input[0].image", "empty"),
        ([{"image": "data:image/png,raw"}], "input[0].image", "base64"),
        ([{"content": [{"type": "audio"}]}], "input[0].content[0]", "image_url"),
        ([{"content": [{"type": ["text"]}]}], "input[0].content[0]", "image_url"),
        ([{"content": [{"type": "image_url", "image_url": BASE64}]}], None, "data URI"),
        ([{"content": [], "text": "a"}], "input[0]", "alone"),
        ([{"text": "\ud800"}], "input[0].text", "surrogate"),
        ([{"text": "a", "instruction": "\udfff"}], "input[0].instruction", "surrogate"),
    ],
)
def test_a_wrong_item_is_named(value: object, param: str | None, words: str) -> None:
    """Each mistake is an error that names the item's path and what is wrong."""
    with pytest.raises(RequestError, match=words) as raised:
        parse(value)
    assert raised.value.param == param or (param is None and raised.value.param)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"txt": "a"}, "txt"),
        ({"text": "a", "video": "v"}, "video"),
        ({"content": [{"type": "text", "text": "a", "cache_control": {}}]}, "cache_control"),
        ({"content": [{"type": "image_url", "image_url": {"url": BASE64, "detail": "low"}}]}, "auto"),
        ({"a" * 10_000: 1}, "aaa[.]{3}$"),
        ({str(i): 1 for i in range(9)}, "0, 1, 2 and 6 more"),
    ],
)
def test_unknown_fields_are_refused_by_name(value: object, words: str) -> None:
    """A field that is not honoured is never ignored; its name is shortened where it is long."""
    with pytest.raises(UnsupportedField, match=words):
        parse(value)


def test_an_instruction_cannot_apply_to_token_ids() -> None:
    """Token ids bypass the template: an instruction beside them is refused, not dropped."""
    with pytest.raises(RequestError, match="bypass the template"):
        parse([[1, 2]], instruction="find it")
