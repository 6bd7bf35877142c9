"""Requests through the real routes and stages: right vectors, or a 400 that shows nothing of the payload."""

from __future__ import annotations

import base64
import binascii
import logging
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
import pytest_asyncio
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from epd.deployments.documents import MSGPACK
from epd.deployments.settings import AuthSettings, LimitSettings
from tests.deployments.local_application import LocalApplication
from tests.models.picture_files import before_pixels, chunk, png_file
from tests.models.pictures import encoded, picture, png
from tests.oracle import Oracle, assert_same

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_TOKENS = 600
SECRET = b"PAYLOAD-THAT-NOBODY-MAY-READ"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def application() -> AsyncIterator[LocalApplication]:
    limits = LimitSettings(max_tokens_per_item=MAX_TOKENS, max_image_pixels=10**6)
    auth = AuthSettings(keys_env="KEYS", isolate_cache=True)
    application = LocalApplication(limits, auth, {"KEYS": "one two"})
    yield application
    await application.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(application: LocalApplication) -> AsyncIterator[httpx.AsyncClient]:
    async with application.client() as client:
        client.headers["Authorization"] = "Bearer one"
        yield client


@pytest.fixture(scope="module")
def oracle(demo_folder: Path) -> Oracle:
    return Oracle(demo_folder)


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def vectors_of(client: httpx.AsyncClient, **body: Any) -> list[np.ndarray]:
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return [np.array(entry["embedding"], np.float32) for entry in answer.json()["data"]]


@pytest.mark.parametrize(
    "value",
    [
        "\u0000",
        "before \u0000 behind",
        "\U0001f469\u200d\U0001f680\ufe0f",
        "e\u0301 is not \u00e9",
        "\u202eright to left\u202c",
        "\ufeff\ufffe\ufffd",
        "\U0010ffff",
        "\r\n\t \u2028",
        "汉字 кириллица عربى हिन्दी",
    ],
)
async def test_any_unicode_has_its_right_vector(
    client: httpx.AsyncClient, oracle: Oracle, value: str
) -> None:
    """NUL, emoji, marks, directions and unassigned characters are just text."""
    for found in await vectors_of(client, input=[value, {"text": value}]):
        assert_same(found, oracle.embed({"parts": [value]}))


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (b'{"input": ["a", "\\ud800"]}', "input[1]", "invalid_value"),
        (b'{"input": {"text": "\\udc00\\ud800"}}', "input.text", "invalid_value"),
        (b'{"input": "a", "instruction": "\\udfff"}', "instruction", "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content", "invalid_value"),
        ('{"input": "\ud800"}'.encode("utf-8", "surrogatepass"), None, "malformed_body"),
        (b'{"input": "\xc3\x28"}', None, "malformed_body"),
        (b'{"input": "a\x00b"}', None, "malformed_body"),
        (b'{"input": "\\ud83d\\ude00"}', "", ""),
    ],
)
async def test_half_a_character_is_refused(
    client: httpx.AsyncClient, body: bytes, param: str | None, code: str
) -> None:
    """A lone surrogate, escaped or raw, broken UTF-8 and a raw NUL in JSON: a 400; a pair is a character."""
    answer = await client.post("/v1/embeddings", content=body)
    if not code:
        assert answer.status_code == 200
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


async def test_a_megabyte_of_text(client: httpx.AsyncClient) -> None:
    """Refused with its length, or cut to the limit; beyond the limit of characters refused unread."""
    megabyte = "word " * 200_000
    answer = await client.post("/v1/embeddings", json={"input": ["a", megabyte]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "input_too_long", "input[1]")
    assert f"at most {MAX_TOKENS} are taken" in error["message"]
    assert len(error["message"]) < 200
    answer = await client.post("/v1/embeddings", json={"input": megabyte, "truncate": "end"})
    assert answer.json()["usage"]["prompt_tokens"] == MAX_TOKENS
    answer = await client.post("/v1/embeddings", json={"input": megabyte * 2, "truncate": "end"})
    assert "2000000 characters and at most 1048576" in answer.json()["error"]["message"]


def huge_png() -> bytes:
    """A header of 30,000 x 30,000 pixels, and a few bytes behind it."""
    return png_file(30_000, 30_000, 8, 2, SECRET)


def corrupt_png() -> bytes:
    """A whole file whose compressed pixels are no compressed data, with its checksum right."""
    good = png(64, 64)
    at = good.index(b"IDAT") - 4
    return good[:at] + chunk(b"IDAT", SECRET * 9) + chunk(b"IEND", b"")


def half(file_format: str) -> bytes:
    data = encoded(picture(200, 150), file_format)
    return data[: len(data) // 2]


BROKEN: dict[str, bytes] = {
    "empty": b"",
    "text": SECRET,
    "html": b"<!DOCTYPE html><html><body>" + SECRET + b"</body></html>",
    "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><text>' + SECRET + b"</text></svg>",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n" + SECRET,
    "signature": b"\x89PNG\r\n\x1a\n" + SECRET,
    "corrupt": corrupt_png(),
    "bomb": huge_png(),
    "over the limit": png(1001, 1000),
    "a line": encoded(picture(402, 2)),
    "text bomb": before_pixels(png(8, 8), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**23)))),
    **{f"half a {each}": half(each) for each in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "AVIF")},
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_picture_is_named_and_nothing_of_it_is_shown(
    client: httpx.AsyncClient,
    application: LocalApplication,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """A 400 with the path of the picture, in JSON and in msgpack; the request beside it is answered."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "epd")
    data, good = BROKEN[name], png(64, 64)
    before = await application.num_encodes()
    as_json = {"input": ["a", {"image": [uri(good), uri(data)]}]}
    as_msgpack = msgpack.packb({"input": ["a", {"image": [good, data]}]})
    answers = [
        await client.post("/v1/embeddings", json=as_json),
        await client.post("/v1/embeddings", content=as_msgpack, headers={"Content-Type": MSGPACK}),
    ]
    captured = capfd.readouterr()
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input[1].image[1]"), answer.text
        for shown in (answer.text, caplog.text, captured.out, captured.err):
            for spelling in (SECRET, base64.b64encode(data)[40:80], binascii.hexlify(data)[40:80]):
                assert not spelling or spelling.decode() not in shown
    assert await vectors_of(client, input=[{"image": uri(good)}])
    assert await application.num_encodes() - before <= 1


@pytest.mark.parametrize(
    "value", ["QUJD!", "QUJ", "QU=JD", "data:image/png;base64,QUJ", "data:image/png,QUJD"]
)
async def test_wrong_base64_is_named(client: httpx.AsyncClient, value: str) -> None:
    """Nothing is guessed, skipped or padded."""
    answer = await client.post("/v1/embeddings", json={"input": ["a", {"image": value}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "input[1].image", "invalid_value")
    assert "QUJ" not in error["message"]


async def test_pixel_bounds_change_the_vector_as_the_processors_do(
    client: httpx.AsyncClient, application: LocalApplication, oracle: Oracle
) -> None:
    """Bounds of a request are the processor's own, and its pictures are encoded apart from others'."""
    data = png(300, 200, 5)
    before = await application.num_encodes()
    bounds = {"min_pixels": 1024, "max_pixels": 16384}
    shape = {"shortest_edge": 1024, "longest_edge": 16384}
    (plain,) = await vectors_of(client, input=[{"image": uri(data)}])
    (small,) = await vectors_of(client, input=[{"image": uri(data)}], mm_processor_kwargs=bounds)
    (again,) = await vectors_of(client, input=[{"image": uri(data)}], mm_processor_kwargs={"size": shape})
    assert await application.num_encodes() == before + 2
    assert np.array_equal(small, again)
    assert_same(plain, oracle.embed({"parts": [data]}))
    processor = oracle.processor.image_processor
    oracle.processor.image_processor = Qwen2VLImageProcessorPil(
        **{**processor.to_dict(), "size": shape, "min_pixels": None, "max_pixels": None}
    )
    try:
        assert_same(small, oracle.embed({"parts": [data]}))
    finally:
        oracle.processor.image_processor = processor
    assert not np.allclose(small, plain, atol=1e-4)


async def test_tenants_never_share_an_encoded_picture(
    client: httpx.AsyncClient, application: LocalApplication
) -> None:
    """Under isolation each key, and each salt of a key, has the picture encoded for itself, once."""
    body = {"input": [{"image": uri(png(90, 70, 9))}]}
    before = await application.num_encodes()
    encodes = []
    for key, salt in (("one", None), ("one", None), ("two", None), ("two", "s"), ("one", "s"), ("one", "s")):
        headers = {"Authorization": f"Bearer {key}"}
        answer = await client.post("/v1/embeddings", json={**body, "cache_salt": salt}, headers=headers)
        assert answer.status_code == 200
        encodes.append(await application.num_encodes() - before)
    assert encodes == [1, 1, 2, 3, 4, 4]
