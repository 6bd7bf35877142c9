"""The OpenAPI document, and the routes held against it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgpack
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from pydantic import TypeAdapter, ValidationError
from schemathesis.specs.openapi.checks import positive_data_acceptance

from epd.deployments.documents import JSON
from epd.deployments.errors import RequestError
from epd.deployments.http import make_app
from epd.deployments.requests import read_request
from epd.deployments.wire import EmbeddingRequestBody, Input, Messages
from tests.deployments.fake_application import FakeApplication

APP = make_app(FakeApplication)
DOCUMENT = APP.openapi()
SCHEMA = schemathesis.openapi.from_asgi("/openapi.json", APP)


@schemathesis.serializer("application/msgpack")  # type: ignore[untyped-decorator]
def to_msgpack(_context: Any, value: Any) -> bytes:
    """Lets generated documents travel as msgpack too."""
    return msgpack.packb(value)  # type: ignore[no-any-return]


@schemathesis.deserializer("application/msgpack")  # type: ignore[untyped-decorator]
def from_msgpack(_context: Any, response: Any) -> Any:
    """Raw vectors have no JSON type: the schema sees base64's."""
    return msgpack.unpackb(
        response.content,
        object_hook=lambda each: {
            key: "" if isinstance(value, bytes) else value for key, value in each.items()
        },
    )


@SCHEMA.parametrize()  # type: ignore[untyped-decorator]
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_generated_requests_are_answered_as_documented(case: schemathesis.Case) -> None:
    """Requests made from the document, and ones it forbids: no 500, only documented statuses and bodies, and
    nothing taken that the document forbids. Some that it allows are refused by rules that no schema can say.
    """
    case.call_and_validate(excluded_checks=[positive_data_acceptance])


def test_the_document_is_served() -> None:
    """/openapi.json is the application's own description, with every status that the errors may have."""
    responses = DOCUMENT["paths"]["/v1/embeddings"]["post"]["responses"]
    assert set(responses) == {"200", "400", "401", "413", "415", "429", "500", "503", "504"}
    assert set(DOCUMENT["paths"]) == {"/v1/embeddings", "/v1/models", "/health", "/info"}


@pytest.mark.parametrize("name", ["text", "picture", "tokens", "messages"])
async def test_the_documents_examples_are_valid(name: str) -> None:
    """What a reader copies from the document is answered."""
    body = DOCUMENT["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"][JSON]
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/v1/embeddings", json=body["examples"][name]["value"])
    assert answer.status_code == 200


IMAGE = "data:image/png;base64,QUJD"
PART = {"type": "image_url", "image_url": {"url": IMAGE}}
TAKEN: list[Any] = [
    "a",
    ["a", "b"],
    [1, 2],
    [[1], [2]],
    {"text": "a"},
    [{"text": "a", "image": IMAGE}, "b", [3]],
    {"image": ["QUJD", IMAGE], "instruction": "i"},
    {"image": "QUJD", "text": ""},
    {"text": "a", "image": []},
    {"content": [{"type": "text", "text": ""}, PART]},
    {"content": [{"type": "image_url", "image_url": IMAGE}]},
]
REFUSED: list[Any] = [
    *(1, None, [], "", [[]], [-1], [1.5], [None], [2**31]),
    *({}, {"text": ""}, {"text": 1}, {"txt": "a"}, {"image": []}, {"image": "%"}, {"image": {"url": IMAGE}}),
    {"content": []},
    {"content": [{"type": "text"}]},
    {"content": [PART], "text": "a"},
    {"content": [{"type": "image_url", "image_url": "QUJD"}]},
    {"content": [{"type": "video_url"}]},
]


@pytest.mark.parametrize("value", TAKEN + REFUSED, ids=lambda value: json.dumps(value)[:40])
def test_the_parser_takes_what_the_document_says(value: Any) -> None:
    """The models of the document and the parser agree on every form of `input`."""
    try:
        TypeAdapter(Input).validate_python(value)
        documented = True
    except ValidationError:
        documented = False
    assert documented == (value in TAKEN)
    assert documented == _is_read({"input": value})


MESSAGES: list[Any] = [
    [{"role": "user", "content": "a"}],
    [{"role": "system", "content": "i"}, {"role": "user", "content": [PART]}],
    [],
    [{"role": "tool", "content": "a"}],
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "audio"}]}],
]


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: json.dumps(value)[:40])
def test_the_parser_takes_the_messages_of_the_document(value: Any) -> None:
    """The same of `messages`, but for rules that no schema can say."""
    try:
        TypeAdapter(Messages).validate_python(value)
        documented = True
    except ValidationError:
        documented = False
    assert documented == _is_read({"messages": value})


def test_every_field_has_a_place_in_the_document() -> None:
    """No field is honoured that the document does not show."""
    shown = DOCUMENT["components"]["schemas"]["EmbeddingRequestBody"]["properties"]
    assert set(shown) == set(EmbeddingRequestBody.model_fields)


def _is_read(document: Any) -> bool:
    try:
        read_request(json.dumps(document).encode(), JSON, max_items=100, allow_urls=False)
    except RequestError:
        return False
    return True
