"""openai-python, as it is."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import Service, same

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.clients


@pytest.fixture
def client(service: Service) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_texts(service: Service, client: Any) -> None:
    """A list of texts gives the vectors that plain HTTP gives (the client asks for base64 by itself)."""
    answer = client.embeddings.create(model=service.model, input=["a red circle", "two squares"])
    vectors = np.array([entry.embedding for entry in answer.data], np.float32)
    assert same(vectors, service.vectors({"input": ["a red circle", "two squares"]}))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_encoding_formats(service: Service, client: Any, encoding_format: str) -> None:
    """Both encodings carry the same vector."""
    answer = client.embeddings.create(model=service.model, input="a", encoding_format=encoding_format)
    raw = answer.data[0].embedding
    if isinstance(raw, str):
        raw = np.frombuffer(base64.b64decode(raw), "<f4")
    assert same(np.array(raw, np.float32), service.vectors({"input": "a"})[0])


def test_dimensions_and_token_ids(service: Service, client: Any) -> None:
    """`dimensions` shortens the vector; token ids are taken."""
    answer = client.embeddings.create(model=service.model, input=[[5, 6], [7]], dimensions=4)
    vectors = np.array([entry.embedding for entry in answer.data], np.float32)
    assert vectors.shape == (2, 4)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_instruction_by_extra_body(service: Service, client: Any) -> None:
    """Fields beyond OpenAI's own go through `extra_body`."""
    answer = client.embeddings.create(model=service.model, input="a", extra_body={"instruction": "find"})
    expected = service.vectors({"input": "a", "instruction": "find"})
    assert same(np.array(answer.data[0].embedding, np.float32), expected[0])


async def test_the_asynchronous_client(service: Service) -> None:
    """AsyncOpenAI gets the same vectors."""
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none") as client:
        answer = await client.embeddings.create(model=service.model, input="a")
    assert same(np.array(answer.data[0].embedding, np.float32), service.vectors({"input": "a"})[0])


def test_errors_are_the_clients_own(service: Service, client: Any) -> None:
    """A refusal reaches the caller as BadRequestError with our param and code."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model=service.model, input=["a", ""])
    assert (raised.value.param, raised.value.code) == ("input[1]", "invalid_value")


def test_models(service: Service, client: Any) -> None:
    """The list of models holds the served one."""
    assert [model.id for model in client.models.list()] == [service.model]
