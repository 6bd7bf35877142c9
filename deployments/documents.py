"""From the bytes of a body to a document of plain values: JSON or msgpack, nothing in it left to chance.

A key that comes twice, NaN and infinities, a nesting too deep and numbers of thousands of digits are
refused: two parsers must never read two different requests out of one body.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn

import msgpack

from epd.deployments.errors import MalformedBody, UnsupportedMediaType

JSON = "application/json"
MSGPACK = "application/msgpack"
_MSGPACK_TYPES = {MSGPACK, "application/x-msgpack", "application/vnd.msgpack"}


def media_type(content_type: str | None) -> str:
    """JSON or MSGPACK for a Content-Type header; none means JSON. Raises UnsupportedMediaType."""
    name = (content_type or JSON).partition(";")[0].strip().lower()
    if name in _MSGPACK_TYPES:
        return MSGPACK
    if name == JSON:
        return JSON
    raise UnsupportedMediaType(f"the Content-Type must be {JSON} or {MSGPACK}")


def accepts_msgpack(accept: str | None) -> bool:
    """Whether an Accept header names msgpack before JSON; JSON is what everyone else gets."""
    for entry in (accept or "").split(","):
        name = entry.partition(";")[0].strip().lower()
        if name in _MSGPACK_TYPES:
            return True
        if name == JSON:
            return False
    return False


def read_document(body: bytes | bytearray, kind: str) -> Any:
    """The document in `body`, which is of media type `kind`. Raises MalformedBody, never with content.

    Call it off the event loop: 32 MiB of JSON take about 60 ms.
    """
    try:
        if kind == MSGPACK:
            return msgpack.unpackb(body, object_pairs_hook=_to_dict, ext_hook=_refuse_extension)
        return json.loads(body.decode(), object_pairs_hook=_to_dict, parse_constant=_refuse_constant)
    except MalformedBody:
        raise
    except UnicodeDecodeError as error:
        raise MalformedBody(f"the body is not valid UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        reason = error.msg.removesuffix(" at")
        raise MalformedBody(f"the body is not valid JSON: {reason} at character {error.pos}") from None
    except RecursionError:
        raise MalformedBody("the body is nested too deep") from None
    except (ValueError, msgpack.UnpackException) as error:
        reason = "nested too deep" if isinstance(error, msgpack.StackError) else "not valid"
        name = "msgpack" if kind == MSGPACK else "JSON"
        raise MalformedBody(f"the body is {name} that is {reason} ({type(error).__name__})") from None


def shown(name: object) -> str:
    """A caller's own name for something, fit for an error: short, and free of unprintable characters."""
    text = str(name)
    short = text if len(text) <= 40 else f"{text[:40]}..."
    return short if short.isprintable() else ascii(short)[1:-1]


def _to_dict(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise MalformedBody(f"the key {shown(twice)!r} comes twice in one object")
    if any(type(name) is not str for name in document):
        raise MalformedBody("the keys of an object must be text")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedBody(f"{name} is no JSON number")


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    raise MalformedBody(f"msgpack extension type {code} is not taken")
