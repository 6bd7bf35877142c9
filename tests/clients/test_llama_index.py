"""LlamaIndex's OpenAIEmbedding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import Service, same

openai = pytest.importorskip("openai")
pytestmark = [
    pytest.mark.clients,
    # Its dependencies warn of their own deprecations as they are imported.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def embedding(service: Service, **options: Any) -> Any:
    module = pytest.importorskip("llama_index.embeddings.openai")
    return module.OpenAIEmbedding(
        model_name=service.model, api_base=f"{service.url}/v1", api_key="none", **options
    )


def test_texts_and_query(service: Service) -> None:
    """Texts, one and many, and queries give the vectors that plain HTTP gives."""
    model = embedding(service)
    texts = ["a red circle", "two squares"]
    expected = service.vectors({"input": texts})
    assert same(np.array(model.get_text_embedding_batch(texts), np.float32), expected)
    assert same(np.array(model.get_text_embedding(texts[1]), np.float32), expected[1])
    assert same(np.array(model.get_query_embedding(texts[0]), np.float32), expected[0])


async def test_asynchronous_texts(service: Service) -> None:
    """The asynchronous half."""
    async with openai.DefaultAsyncHttpxClient() as http:
        vector = await embedding(service, async_http_client=http).aget_text_embedding("a")
    assert same(np.array(vector, np.float32), service.vectors({"input": "a"})[0])
