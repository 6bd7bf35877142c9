"""Fuzzing of everything between a body's bytes and the items: an answer or a clear refusal, never more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from epd.deployments.answers import error_body
from epd.deployments.documents import JSON, MSGPACK
from epd.deployments.errors import RequestError
from epd.deployments.http import make_app
from epd.deployments.items import Item
from epd.deployments.preparation import ItemPreparer, PreparedRequest, TokenRules
from epd.deployments.requests import EmbeddingRequest, read_request
from epd.deployments.settings import LimitSettings
from epd.deployments.wire import EmbeddingRequestBody
from epd.models.checkpoint import Checkpoint
from epd.models.families import family_of
from epd.models.images import ImagePreprocessor
from tests.deployments.fake_application import FakeApplication
from tests.fuzzing import fuzz

pytestmark = pytest.mark.long
# A body that takes seconds is a hang.
BOUNDED = settings(deadline=3000, suppress_health_check=list(HealthCheck), database=None)

NAMES = st.sampled_from(
    [
        *EmbeddingRequestBody.model_fields,
        "text",
        "image",
        "content",
        "type",
        "image_url",
        "url",
        "detail",
        "role",
        "min_pixels",
        "max_pixels",
        "size",
        "shortest_edge",
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())  # lone surrogates too
    | st.sampled_from(
        [
            "text",
            "image_url",
            "user",
            "system",
            "end",
            "float",
            "base64",
            "data:image/png;base64,QUJD",
            "QUJD",
            "data:,",
        ]
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)
DOCUMENTS = st.fixed_dictionaries({}, optional={"input": VALUES, "messages": VALUES}).flatmap(
    lambda fixed: st.dictionaries(NAMES, VALUES, max_size=3).map(lambda rest: {**rest, **fixed})
)
BINARY = st.recursive(
    LEAVES.filter(lambda leaf: not isinstance(leaf, int) or -(2**63) <= leaf < 2**64)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=20,
)


def read(body: bytes, kind: str) -> EmbeddingRequest | None:
    """What the parser makes of a body; None for a refusal that can be answered as it is."""
    try:
        return read_request(body, kind, max_items=8, allow_urls=True)
    except RequestError as error:
        refusal = error_body(error.body())
    assert len(refusal) < 2000
    return None


@settings(BOUNDED, max_examples=3000)
@given(st.binary() | st.text().map(str.encode), st.sampled_from([JSON, MSGPACK]))
def test_any_bytes(body: bytes, kind: str) -> None:
    """Bytes of no meaning at all."""
    read(body, kind)


@settings(BOUNDED, max_examples=1500)
@given(DOCUMENTS)
@example({"input": [{"text": "a", "image": "data:;base64,"}]})
def test_any_document(document: dict[str, Any]) -> None:
    """Documents of the right names and the wrong values, NaN and lone surrogates among them."""
    request = read(json.dumps(document).encode("utf-8", "surrogatepass"), JSON)
    if request is not None:
        assert 1 <= len(request.items) <= 8


@settings(BOUNDED, max_examples=1000)
@given(st.dictionaries(NAMES, BINARY, max_size=4))
def test_any_msgpack_document(document: dict[str, Any]) -> None:
    """The same in msgpack, with raw bytes anywhere."""
    read(msgpack.packb(document, unicode_errors="surrogatepass"), MSGPACK)


@settings(BOUNDED, max_examples=800)
@given(DOCUMENTS, st.data())
def test_any_damage(document: dict[str, Any], data: st.DataObject) -> None:
    """Valid documents with bytes changed, dropped or doubled."""
    body = bytearray(json.dumps(document).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    read(bytes(body), JSON)


ITEMS: list[Any] = [
    "a text",
    [1, 2, 3],
    {"text": "a", "image": ["QUJD", "data:image/png;base64,QUJD"], "instruction": "i"},
    {
        "content": [
            {"type": "text", "text": "b"},
            {"type": "image_url", "image_url": {"url": "data:;base64,QUJD"}},
        ]
    },
]
FIELDS: dict[str, Any] = {
    "dimensions": 2,
    "encoding_format": "base64",
    "truncate": "end",
    "cache_salt": "s",
    "normalize": True,
    "mm_processor_kwargs": {"size": {"shortest_edge": 1, "longest_edge": 2}},
}
WHOLE: list[dict[str, Any]] = [
    *({"input": item, **FIELDS} for item in ITEMS),
    {"input": ITEMS, "model": "m", "user": "u"},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": ITEMS[3]["content"]}]},
]


@pytest.mark.parametrize("kind", [JSON, MSGPACK])
def test_any_damage_for_a_minute(kind: str, tmp_path: Path) -> None:
    """Whole requests with their bytes damaged: read or refused at once, in memory that stays flat."""
    bodies = [json.dumps(each).encode() if kind == JSON else msgpack.packb(each) for each in WHOLE]
    fuzz(bodies, lambda body: read(body, kind) is not None, tmp_path)


@settings(BOUNDED, max_examples=300)
@given(st.binary() | DOCUMENTS.map(lambda document: json.dumps(document).encode()))
async def test_no_body_makes_the_server_fail(body: bytes) -> None:
    """Through all of HTTP the answer is a success or the caller's mistake."""
    transport = httpx.ASGITransport(make_app(FakeApplication))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post("/v1/embeddings", content=body)
    assert answer.status_code in (200, 400)


@pytest.fixture(scope="module")
def preparer(demo_folder: Path) -> ItemPreparer:
    checkpoint = Checkpoint.open(demo_folder)
    family = family_of(checkpoint)
    return ItemPreparer(
        family.make_prompt(checkpoint),
        ImagePreprocessor(checkpoint),
        "ns",
        LimitSettings(max_tokens_per_item=200),
        TokenRules.of(family, checkpoint.config),
    )


@settings(BOUNDED, max_examples=500)
@given(
    st.lists(st.text(), min_size=1, max_size=3).filter(any),
    st.none() | st.text(),
    st.booleans(),
    st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300).map(tuple),
)
def test_any_item_is_prepared_or_refused(
    preparer: ItemPreparer,
    parts: list[str],
    instruction: str | None,
    truncate: bool,
    token_ids: tuple[int, ...] | None,
) -> None:
    """Any text in any writing, any instruction and any ids: at most the limit's tokens, or a refusal."""
    item = Item(() if token_ids else tuple(parts), "input", instruction, truncate, token_ids)
    try:
        outcome: PreparedRequest | RequestError = preparer.prepare([item])
    except RequestError as error:
        outcome = error
    if isinstance(outcome, RequestError):
        assert outcome.param == "input"
    else:
        assert 1 <= outcome.num_tokens <= 200
