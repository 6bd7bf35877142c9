"""A body's own fields: honoured or refused by name."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgpack
import pytest

from epd.deployments.documents import JSON, MSGPACK
from epd.deployments.errors import MalformedBody, RequestError, UnsupportedField, UrlNotAllowed
from epd.deployments.items import ImagePart, PixelRequest
from epd.deployments.requests import EmbeddingRequest, read_request
from epd.deployments.wire import WHY_REFUSED, EmbeddingRequestBody

USER = {"role": "user", "content": "a"}
URL = "https://example.org/a.png"


def read(document: Any, *, kind: str = JSON, allow_urls: bool = False) -> EmbeddingRequest:
    body = json.dumps(document).encode() if kind == JSON else msgpack.packb(document)
    return read_request(body, kind, max_items=4, allow_urls=allow_urls)


def test_fields_reach_the_request() -> None:
    """What the caller asks for is in the request, with defaults for the rest."""
    fields = {"model": "m", "dimensions": 2, "encoding_format": "base64", "cache_salt": "s", "user": "u"}
    request = read({"input": "a", **fields, "instruction": "i", "truncate": "end"})
    assert (request.model, request.dimensions) == ("m", 2)
    assert (request.encoding_format, request.cache_salt) == ("base64", "s")
    (item,) = request.items
    assert (item.instruction, item.truncate) == ("i", True)
    (item,) = read({"input": "a"}).items
    assert (item.instruction, item.truncate) == (None, False)


def test_null_is_the_same_as_absent() -> None:
    """Clients that write out every field send null for those not set."""
    document = dict.fromkeys(EmbeddingRequestBody.model_fields)
    assert read({**document, "input": "a"}) == read({"input": "a"})


def test_raw_bytes_and_base64_are_the_same_request() -> None:
    """In msgpack a picture may be raw bytes: the same request as its base64 in JSON."""
    picture = b"\x89PNG \x00\xff"
    raw = read({"input": [{"image": picture}]}, kind=MSGPACK)
    assert raw == read({"input": [{"image": base64.b64encode(picture).decode()}]})
    assert raw.items[0].parts == (ImagePart(picture, "input[0].image"),)


def test_messages_stand_instead_of_input() -> None:
    """vLLM's form gives one item; both forms together, or none, are refused."""
    assert [item.parts for item in read({"messages": [USER]}).items] == [("a",)]
    with pytest.raises(RequestError, match="not both"):
        read({"messages": [USER], "input": "a"})
    with pytest.raises(RequestError, match="nothing"):
        read({})


def test_urls_are_taken_where_they_are_allowed() -> None:
    """`allow_urls` reaches items and messages."""
    part = {"type": "image_url", "image_url": {"url": URL}}
    for document in (
        {"input": {"image": URL}},
        {"input": {"content": [part]}},
        {"messages": [{"role": "user", "content": [part]}]},
    ):
        assert len(read(document, allow_urls=True).items) == 1
        with pytest.raises(UrlNotAllowed, match="not fetched"):
            read(document)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "2"}, "dimensions"),
        ({"dimensions": 2.0}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": ["float"]}, "encoding_format"),
        ({"truncate": True}, "truncate"),
        ({"truncate": "START"}, "truncate"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a" * 1025}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"instruction": "\ud800"}, "instruction"),
        ({"instruction": 1}, "instruction"),
        ({"user": {}}, "user"),
        ({"model": "\ud800"}, "model"),
    ],
)
def test_a_wrong_value_names_its_field(fields: dict[str, Any], param: str) -> None:
    """A field's wrong value is a mistake that names the field."""
    with pytest.raises(RequestError) as raised:
        read({"input": "a", **fields})
    assert raised.value.param == param


NEUTRAL = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "normalize": True,
    "normalized": True,
    "use_activation": True,
    "embedding_types": ["float"],
    "embedding_type": "float",
    "output_dtype": "float",
    "embed_dtype": "float32",
    "endianness": "little",
    "priority": 0,
    "late_chunking": False,
    "return_multivector": False,
    "padding": "do_not_pad",
}
CHANGES_THE_VECTOR = {
    "continue_final_message": True,
    "add_generation_prompt": False,
    "add_special_tokens": False,
    "normalize": False,
    "normalized": False,
    "use_activation": False,
    "embedding_types": ["int8"],
    "embedding_type": "binary",
    "output_dtype": "int8",
    "embed_dtype": "float16",
    "endianness": "big",
    "priority": 1,
    "late_chunking": True,
    "return_multivector": True,
    "padding": "max_length",
    "truncate_prompt_tokens": 8,
    "truncation_side": "left",
    "mm_processor_kwargs": {"fps": 2},
    "media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}},
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"a": 1},
    "task": "retrieval.query",
    "input_type": "search_query",
    "prompt_name": "query",
    "output_dimension": 2,
}


@pytest.mark.parametrize("name", WHY_REFUSED)
def test_other_services_fields_are_refused_by_name(name: str) -> None:
    """What vLLM's, Jina's and Cohere's clients send and this service cannot honour is refused, with why."""
    with pytest.raises(UnsupportedField) as raised:
        read({"input": "a", name: CHANGES_THE_VECTOR[name]})
    assert (raised.value.param, raised.value.message) == (name, WHY_REFUSED[name])


@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_change_nothing_are_taken(name: str) -> None:
    """A field whose value asks for what is done anyway is no reason to refuse."""
    assert read({"input": "a", name: NEUTRAL[name]}) == read({"input": "a"})


@pytest.mark.parametrize(
    ("kwargs", "pixels"),
    [
        ({"min_pixels": 1}, PixelRequest(min_pixels=1)),
        ({"max_pixels": 9}, PixelRequest(max_pixels=9)),
        ({"size": {"shortest_edge": 1, "longest_edge": 9}}, PixelRequest(1, 9)),
        ({}, PixelRequest()),
    ],
)
def test_pixel_bounds_reach_every_item(kwargs: dict[str, Any], pixels: PixelRequest) -> None:
    """vLLM's `mm_processor_kwargs`, in either of its forms, for items and messages."""
    for document in ({"input": ["a", {"image": "QUJD"}]}, {"messages": [USER]}):
        items = read({**document, "mm_processor_kwargs": kwargs}).items
        assert {item.pixels for item in items} == {pixels}


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        (1, ""),
        ({"min_pixels": 0}, ".min_pixels"),
        ({"max_pixels": "9"}, ".max_pixels"),
        ({"max_pixels": True}, ".max_pixels"),
        ({"max_pixels": 2**31}, ".max_pixels"),
        ({"size": {"longest_edge": -1}}, ".size.longest_edge"),
        ({"size": {"longest_edge": 9}, "min_pixels": 1}, ""),
    ],
)
def test_wrong_pixel_bounds_are_named(kwargs: Any, param: str) -> None:
    """A value that is no bound is a mistake at its own path."""
    with pytest.raises(RequestError) as raised:
        read({"input": "a", "mm_processor_kwargs": kwargs})
    assert (raised.value.param, raised.value.code) == (f"mm_processor_kwargs{param}", "invalid_value")


@pytest.mark.parametrize("kwargs", [{"do_resize": False}, {"size": {"height": 9}}, {"size": {}, "fps": 2}])
def test_other_settings_of_the_processor_are_refused(kwargs: dict[str, Any]) -> None:
    """What else the processor could be told is refused by name, also inside `size`."""
    with pytest.raises(UnsupportedField, match="only min_pixels, max_pixels and size"):
        read({"input": "a", "mm_processor_kwargs": kwargs})


def test_unknown_fields_are_refused_by_name() -> None:
    """A misspelt field is never ignored."""
    with pytest.raises(UnsupportedField, match="inptu: unknown field"):
        read({"input": "a", "inptu": 1})
    with pytest.raises(UnsupportedField, match=r"\\ud800: unknown field"):
        read({"input": "a", "\ud800": 1})


def test_contradicting_prompts_are_refused() -> None:
    """An assistant's turn cannot both be continued and be followed by another."""
    messages = [USER, {"role": "assistant", "content": ""}]
    assert read({"messages": messages, "continue_final_message": True}).items
    with pytest.raises(UnsupportedField, match="contradicts"):
        read({"messages": messages, "continue_final_message": True, "add_generation_prompt": True})


@pytest.mark.parametrize("document", [[], "a", 1, None, True])
def test_a_body_is_one_object(document: Any) -> None:
    """Valid JSON of another kind is no request."""
    with pytest.raises(MalformedBody, match="one object"):
        read(document)
