"""Vectors to bytes, in each of the forms that a caller may ask for."""

from __future__ import annotations

import base64
import json

import msgpack
import numpy as np
import pytest

from epd.deployments.answers import error_body, error_headers, to_json, to_msgpack
from epd.deployments.errors import RateLimited, StageUnavailable, Unauthorized
from epd.deployments.service import Embedded

VECTORS = np.array([[0.6, 0.8], [1.0, -0.0], [1e-38, 0.1]], np.float32)
EMBEDDED = Embedded(VECTORS, 7)


def test_floats_keep_every_bit() -> None:
    """Numbers written as JSON read back as the same float32."""
    document = json.loads(to_json(EMBEDDED, 'a "model"', "float"))
    assert [entry["index"] for entry in document["data"]] == [0, 1, 2]
    vectors = np.array([entry["embedding"] for entry in document["data"]], np.float32)
    assert vectors.tobytes() == VECTORS.tobytes()
    assert (document["object"], document["model"]) == ("list", 'a "model"')
    assert document["usage"] == {"prompt_tokens": 7, "total_tokens": 7}


def test_base64_and_msgpack_carry_little_endian_float32() -> None:
    """Both hold the same bytes, and differ from the float form in nothing else."""
    floats = json.loads(to_json(EMBEDDED, "m", "float"))
    coded = json.loads(to_json(EMBEDDED, "m", "base64"))
    packed = msgpack.unpackb(to_msgpack(EMBEDDED, "m"))
    for document in (coded, packed):
        for entry, vector in zip(document["data"], VECTORS, strict=True):
            raw = entry["embedding"]
            raw = base64.b64decode(raw) if isinstance(raw, str) else raw
            assert np.array_equal(np.frombuffer(raw, "<f4"), vector)
            entry["embedding"] = vector.tolist()
        assert document == floats


def test_a_vector_that_is_no_number_is_never_written() -> None:
    """NaN is no JSON: it is our error, not the caller's to parse."""
    with pytest.raises(ValueError, match="JSON"):
        to_json(Embedded(np.array([[np.nan]], np.float32), 1), "m", "float")


def test_error_headers() -> None:
    """Retry-After is in whole seconds, never too early and never 0; a 401 names the scheme."""
    assert error_headers(StageUnavailable("gone")) == {"Retry-After": "2"}
    assert error_headers(RateLimited("often", 2.1)) == {"Retry-After": "3"}
    assert error_headers(RateLimited("often", 0.01)) == {"Retry-After": "1"}
    assert error_headers(Unauthorized("no")) == {"WWW-Authenticate": "Bearer"}


def test_error_bodies_are_ascii() -> None:
    """Also when a caller's own text is in them."""
    assert error_body({"message": "\ud800 é"}).isascii()
