"""Vectors to the bytes of an answer, and errors to theirs."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Literal

import msgpack
import numpy as np
import numpy.typing as npt
from pydantic_core import to_json as to_json_bytes

from epd.deployments.errors import EPDError
from epd.deployments.service import Embedded

Vector = npt.NDArray[np.float32]


def to_json(embedded: Embedded, model: str, encoding_format: Literal["float", "base64"]) -> bytes:
    """OpenAI's list of embeddings. Call it off the event loop.

    Vectors are written one by one: the encoder holds the interpreter's lock for one at a time, about a
    millisecond at most, and the event loop runs in between.
    """
    write = _base64 if encoding_format == "base64" else _floats
    entries = [
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, write(vector))
        for index, vector in enumerate(embedded.vectors)
    ]
    rest = json.dumps({"model": model, "usage": _usage(embedded)}, separators=(",", ":")).encode()
    return b'{"object":"list","data":[%b],%b' % (b",".join(entries), rest[1:])


def to_msgpack(embedded: Embedded, model: str) -> bytes:
    """The same document in msgpack; each embedding is the raw bytes of little-endian float32."""
    data = [
        {"object": "embedding", "index": index, "embedding": _bytes(vector)}
        for index, vector in enumerate(embedded.vectors)
    ]
    document = {"object": "list", "data": data, "model": model, "usage": _usage(embedded)}
    packed: bytes = msgpack.packb(document)
    return packed


def error_headers(error: EPDError) -> dict[str, str]:
    """Retry-After, rounded up to whole seconds, and for 401 the scheme that is asked for."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_body(body: dict[str, Any]) -> bytes:
    """ASCII alone, so that no text of a caller's, however broken, can break the answer."""
    return json.dumps(body).encode()


def _usage(embedded: Embedded) -> dict[str, int]:
    return {"prompt_tokens": embedded.num_tokens, "total_tokens": embedded.num_tokens}


def _bytes(vector: Vector) -> bytes:
    return vector.astype("<f4").tobytes()


def _base64(vector: Vector) -> bytes:
    return b'"%b"' % base64.b64encode(_bytes(vector))


def _floats(vector: Vector) -> bytes:
    if not np.isfinite(vector).all():
        raise ValueError("a vector holds a value that JSON cannot write")
    return to_json_bytes(vector.tolist())  # seven times faster than the standard library's
