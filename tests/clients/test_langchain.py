"""LangChain's OpenAIEmbeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import Service, same

openai = pytest.importorskip("openai")
langchain_openai = pytest.importorskip("langchain_openai")
tiktoken = pytest.importorskip("tiktoken")
pytestmark = pytest.mark.clients


def embeddings(service: Service, **options: Any) -> Any:
    return langchain_openai.OpenAIEmbeddings(
        model=service.model, base_url=f"{service.url}/v1", api_key="none", **options
    )


def test_documents_and_query(service: Service) -> None:
    """With `check_embedding_ctx_length=False` LangChain sends text, as a model of other tokens needs."""
    model = embeddings(service, check_embedding_ctx_length=False)
    texts = ["a red circle", "two squares"]
    expected = service.vectors({"input": texts})
    assert same(np.array(model.embed_documents(texts), np.float32), expected)
    assert same(np.array(model.embed_query(texts[0]), np.float32), expected[0])


async def test_asynchronous_documents_and_dimensions(service: Service) -> None:
    """The asynchronous half, with shorter vectors."""
    async with openai.DefaultAsyncHttpxClient() as http:
        model = embeddings(service, check_embedding_ctx_length=False, dimensions=4, http_async_client=http)
        vectors = await model.aembed_documents(["a"])
    assert same(np.array(vectors, np.float32), service.vectors({"input": ["a"], "dimensions": 4}))


def test_token_arrays(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself LangChain sends token ids of its own encoding: they are embedded as ids."""
    ranks = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding("cl100k_base", pat_str=r"\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", encoding)
    vectors = embeddings(service).embed_documents(["abc", "d"])
    expected = service.vectors({"input": [list(b"abc"), list(b"d")]})
    assert same(np.array(vectors, np.float32), expected)
