"""The HTTP face over an application that tests can bend."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from epd.deployments.errors import (
    DeadlineExceeded,
    EPDError,
    InputTooLong,
    Overloaded,
    RequestError,
    StageUnavailable,
    UrlFetchFailed,
)
from epd.deployments.http import make_app
from epd.deployments.items import Item
from epd.deployments.settings import AuthSettings, FetchSettings, LimitSettings, ModelSettings, Settings
from tests.deployments.fake_application import FakeApplication, fake_vector

SETTINGS = Settings(model=ModelSettings(name="fake"), limits=LimitSettings(max_body_bytes=2000, max_items=4))
MSGPACK = "application/msgpack"


def client_of(application: FakeApplication) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(make_app(lambda: application), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
def application() -> FakeApplication:
    return FakeApplication(SETTINGS)


@pytest.fixture
async def client(application: FakeApplication) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(application) as client:
        yield client


async def test_answer_is_openais_list(client: httpx.AsyncClient) -> None:
    """Vectors come as OpenAI's list of embeddings, with usage."""
    answer = await client.post("/v1/embeddings", json={"input": ["a", "b"], "model": "fake"})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", "fake")
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    vectors = np.array([entry["embedding"] for entry in body["data"]], np.float32)
    assert np.array_equal(vectors, [fake_vector(Item((text,), "")) for text in ("a", "b")])


async def test_base64_is_little_endian_float32(client: httpx.AsyncClient) -> None:
    """`encoding_format: base64` carries the same values as little-endian f4."""
    answer = await client.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"})
    raw = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), fake_vector(Item(("a",), "")))


async def test_msgpack_both_ways(client: httpx.AsyncClient, application: FakeApplication) -> None:
    """The same document with raw image bytes in, raw vector bytes out when Accept asks for them."""
    picture = b"\x89PNG \xff"
    headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
    body = msgpack.packb({"input": [{"image": picture}], "dimensions": 4})
    answer = await client.post("/v1/embeddings", content=body, headers=headers)
    assert answer.headers["content-type"] == MSGPACK
    (entry,) = msgpack.unpackb(answer.content)["data"]
    expected = fake_vector(application.requests[0].items[0], 4)
    assert np.array_equal(np.frombuffer(entry["embedding"], "<f4"), expected)
    as_json = await client.post(
        "/v1/embeddings",
        json={"input": [{"image": base64.b64encode(picture).decode()}], "dimensions": 4},
        headers={"Accept": MSGPACK},
    )
    assert as_json.content == answer.content
    assert application.requests[0] == application.requests[1]


async def test_msgpack_in_json_out(client: httpx.AsyncClient) -> None:
    """Content-Type and Accept are independent; errors are JSON whatever Accept says."""
    headers = {"Content-Type": MSGPACK}
    answer = await client.post("/v1/embeddings", content=msgpack.packb({"input": "a"}), headers=headers)
    assert answer.json()["object"] == "list"
    headers["Accept"] = MSGPACK
    answer = await client.post("/v1/embeddings", content=msgpack.packb({"input": 1}), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": "a", "inptu": 1}, "inptu", "unsupported_field"),
        ({}, "input", "invalid_value"),
        ({"input": ["a"] * 5}, "input", "invalid_value"),
        ({"input": "a", "dimensions": "2"}, "dimensions", "invalid_value"),
        ({"input": "a", "dimensions": 9}, "dimensions", "invalid_value"),
        ({"input": "a", "model": "other"}, "model", "model_not_found"),
        ({"input": "a", "normalize": False}, "normalize", "unsupported_field"),
        ({"input": ["a", {"image": "https://a.test/"}]}, "input[1].image", "url_not_allowed"),
        ({"input": {"text": "\ud800"}}, "input.text", "invalid_value"),
        ([], None, "malformed_body"),
    ],
)
async def test_a_wrong_body_names_the_field(
    client: httpx.AsyncClient, application: FakeApplication, body: Any, param: str, code: str
) -> None:
    """Unknown and wrong fields are a 400 that names them and its kind."""
    answer = await client.post("/v1/embeddings", content=json.dumps(body))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b'{"input":"a","input":"b"}', b'{"input":NaN}', b"\xff", b"[" * 2000])
async def test_a_body_that_is_no_document_is_a_400(
    client: httpx.AsyncClient, application: FakeApplication, body: bytes
) -> None:
    """Broken, ambiguous and deeply nested bodies are the caller's mistake; nothing is computed."""
    answer = await client.post("/v1/embeddings", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_body")
    assert application.requests == []


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(client: httpx.AsyncClient, chunked: bool) -> None:
    """A body too large is refused whether or not its length was announced."""

    async def chunks() -> Any:
        for _ in range(300):
            yield b"x" * 10

    answer = await client.post("/v1/embeddings", content=chunks() if chunked else b"x" * 3000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
    assert "2000" in answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_not_read_to_its_end(client: httpx.AsyncClient) -> None:
    """Reading stops at the limit, not at the end of what is sent."""
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        for _ in range(300):
            sent += 1
            yield b"x" * 1000

    assert (await client.post("/v1/embeddings", content=chunks())).status_code == 413
    assert sent == 3


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
async def test_other_bodies_are_a_415(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    """Neither forms nor compressed bodies are guessed at."""
    answer = await client.post("/v1/embeddings", content=b'{"input":"a"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (RequestError("bad", "input[3].image"), 400, None),
        (InputTooLong("9 tokens and at most 8", "input[0]"), 400, None),
        (UrlFetchFailed("answered 404", "input.image"), 400, None),
        (Overloaded("full"), 429, "1"),
        (StageUnavailable("gone"), 503, "2"),
        (DeadlineExceeded("late"), 504, None),
    ],
)
async def test_each_error_has_its_status(
    client: httpx.AsyncClient, application: FakeApplication, error: EPDError, status: int, retry: str | None
) -> None:
    """Errors of the tree become their status, with Retry-After where trying again helps."""
    application.error = error
    answer = await client.post("/v1/embeddings", json={"input": "a"})
    assert (answer.status_code, answer.headers.get("retry-after")) == (status, retry)
    assert answer.json() == error.body()


async def test_an_unexpected_error_leaks_nothing(
    client: httpx.AsyncClient, application: FakeApplication
) -> None:
    """An error that nobody foresaw is a 500 without its text."""
    application.error = KeyError("secret")
    answer = await client.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"] == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


async def test_an_error_never_holds_a_pictures_bytes(client: httpx.AsyncClient) -> None:
    """Not even when a picture stands where it does not belong."""
    picture = base64.b64encode(b"secret picture").decode()
    for body in (
        {"input": {"image": picture + "!"}},
        {"input": {"image": f"data:image/png,{picture}"}},
        {"input": "a", "dimensions": picture},
        {"input": "a", "encoding_format": picture},
        {"input": "a", "model": picture},
    ):
        answer = await client.post("/v1/embeddings", json=body)
        assert answer.status_code == 400
        assert picture[:12] not in answer.text


async def test_health_says_when_a_stage_is_gone(
    client: httpx.AsyncClient, application: FakeApplication
) -> None:
    """/health is 200 when all stages can serve and 503 otherwise."""
    assert (await client.get("/health")).status_code == 200
    application.error = StageUnavailable("gone")
    assert (await client.get("/health")).status_code == 503


async def test_models_and_unknown_paths(client: httpx.AsyncClient) -> None:
    """/v1/models lists the served model; unknown paths and methods answer in the same error shape."""
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
    answer = await client.get("/v2/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = await client.get("/v1/embeddings")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_with_keys_only_callers_with_one_are_answered() -> None:
    """A request without a key is a 401 before its body is looked at; /health needs none."""
    application = FakeApplication(Settings(auth=AuthSettings(keys_env="KEYS")), {"KEYS": "secret"})
    async with client_of(application) as client:
        for call in (
            client.post("/v1/embeddings", content=b"x" * 10**6),
            client.get("/v1/models"),
            client.get("/info"),
        ):
            answer = await call
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/health")).status_code == 200
        client.headers["Authorization"] = "Bearer secret"
        assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/info")).status_code == 200


async def test_a_key_that_asks_too_often_is_told_when_to_come_back() -> None:
    """Beyond its rate a key gets a 429 with Retry-After; other keys are answered."""
    auth = AuthSettings(keys_env="KEYS", requests_per_minute=1, burst=1)
    async with client_of(FakeApplication(Settings(auth=auth), {"KEYS": "one two"})) as client:
        statuses = []
        for key in ("one", "one", "two"):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
            statuses.append((answer.status_code, answer.json().get("error", {}).get("code")))
            if answer.status_code == 429:
                assert 55 <= int(answer.headers["retry-after"]) <= 60
    assert statuses == [(200, None), (429, "rate_limit_exceeded"), (200, None)]


@pytest.mark.parametrize("isolate", [False, True])
async def test_the_salt_follows_the_key_when_caches_are_isolated(isolate: bool) -> None:
    """With isolation two keys' requests never carry the same salt; without it the request's own is used."""
    auth = AuthSettings(keys_env="KEYS", isolate_cache=isolate)
    application = FakeApplication(Settings(auth=auth), {"KEYS": "one two"})
    async with client_of(application) as client:
        for key, salt in (("one", None), ("two", None), ("one", "s"), ("two", "s")):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"input": "a", "cache_salt": salt}
            assert (await client.post("/v1/embeddings", json=body, headers=headers)).status_code == 200
    salts = [request.cache_salt for request in application.requests]
    assert (len(set(salts)) == 4) if isolate else (salts == [None, None, "s", "s"])


async def test_urls_reach_the_application_where_they_are_on() -> None:
    """With fetching on, a URL is a part for the application to fetch."""
    settings = Settings(fetch=FetchSettings(enabled=True, hosts=("a.test",)))
    application = FakeApplication(settings)
    async with client_of(application) as client:
        answer = await client.post("/v1/embeddings", json={"input": {"image": "https://a.test/x"}})
    assert answer.status_code == 200
    assert application.requests[0].items[0].parts[0].url == "https://a.test/x"  # type: ignore[union-attr]


async def test_a_client_that_leaves_early_is_no_error_of_ours(application: FakeApplication) -> None:
    """A body that ends with the connection computes nothing and raises nothing."""
    app = make_app(lambda: application)
    scope = {
        "type": "http", "method": "POST", "path": "/v1/embeddings", "raw_path": b"/v1/embeddings",
        "query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http",
        "server": ("test", 80), "client": ("test", 1), "root_path": "", "asgi": {"version": "3.0"},
    }  # fmt: skip
    events = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(events)

    async def send(message: Any) -> None:
        sent.append(message)

    with contextlib.suppress(OSError):
        await app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert application.requests == []
