"""The HTTP face over an application that tests can bend."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from epd.deployments.errors import DeadlineExceeded, EPDError, Overloaded, RequestError, StageUnavailable
from epd.deployments.http import EmbeddingRequest, make_app
from epd.deployments.service import Embedded

VECTORS = np.array([[0.6, 0.8], [1.0, 0.0]], np.float32)


class FakeApplication:
    """Answers every request with the same vectors, or raises what it is told to."""

    served_name = "fake"
    max_body_bytes = 200

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.requests: list[EmbeddingRequest] = []

    async def embed_request(self, request: EmbeddingRequest) -> Embedded:
        self.requests.append(request)
        if self.error:
            raise self.error
        return Embedded(VECTORS, 7)

    async def health(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        return {"status": "ok"}

    async def info(self) -> dict[str, Any]:
        return {"stages": {}}


@pytest.fixture
def application() -> FakeApplication:
    return FakeApplication()


@pytest.fixture
def client(application: FakeApplication) -> Iterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(lambda: application), raise_app_exceptions=False)
    yield httpx.AsyncClient(transport=transport, base_url="http://test")


async def test_answer_is_openais_list(client: httpx.AsyncClient) -> None:
    """Vectors come as OpenAI's list of embeddings, with usage."""
    answer = await client.post("/v1/embeddings", json={"input": ["a", "b"], "model": "fake"})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", "fake")
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    assert np.array_equal(np.array([e["embedding"] for e in body["data"]], np.float32), VECTORS)


async def test_base64_is_little_endian_float32(client: httpx.AsyncClient) -> None:
    """`encoding_format: base64` carries the same values as little-endian f4."""
    answer = await client.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"})
    raw = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), VECTORS[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "inptu": 1}, "inptu"),
        ({}, "input"),
        ({"input": "a", "dimensions": "2"}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "model": "other"}, "model"),
    ],
)
async def test_a_wrong_body_names_the_field(
    client: httpx.AsyncClient, application: FakeApplication, body: dict[str, Any], param: str
) -> None:
    """Unknown and wrong fields are a 400 that names them; nothing is computed."""
    answer = await client.post("/v1/embeddings", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert application.requests == []


async def test_a_body_that_is_not_json_is_a_400(client: httpx.AsyncClient) -> None:
    """Broken JSON is the caller's mistake."""
    answer = await client.post("/v1/embeddings", content=b"{")
    assert answer.status_code == 400


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413(client: httpx.AsyncClient, chunked: bool) -> None:
    """A body too large is refused whether or not its length was announced."""

    async def chunks() -> Any:
        for _ in range(30):
            yield b"x" * 10

    answer = await client.post("/v1/embeddings", content=chunks() if chunked else b"x" * 300)
    assert answer.status_code == 413
    assert "200" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (RequestError("bad", "input[3].image"), 400, None),
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
    assert answer.json()["error"]["param"] == error.param


async def test_an_unexpected_error_leaks_nothing(
    client: httpx.AsyncClient, application: FakeApplication
) -> None:
    """An error that nobody foresaw is a 500 without its text."""
    application.error = KeyError("secret")
    answer = await client.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.json()["error"]["message"] == "internal error"


async def test_health_says_when_a_stage_is_gone(
    client: httpx.AsyncClient, application: FakeApplication
) -> None:
    """/health is 200 when all stages can serve and 503 otherwise."""
    assert (await client.get("/health")).status_code == 200
    application.error = StageUnavailable("gone")
    assert (await client.get("/health")).status_code == 503


async def test_models_and_unknown_paths(client: httpx.AsyncClient) -> None:
    """/v1/models lists the served model; an unknown path is a 404 in the same error shape."""
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "fake"
    answer = await client.get("/v2/nothing")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "Not Found")
