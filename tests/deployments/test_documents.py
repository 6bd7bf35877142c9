"""Bodies to documents: nothing that two parsers could read differently gets through."""

from __future__ import annotations

import json

import msgpack
import pytest

from epd.deployments.documents import JSON, MSGPACK, accepts_msgpack, media_type, read_document, shown
from epd.deployments.errors import MalformedBody, UnsupportedMediaType

DOCUMENT = {"input": [{"text": "a\u0000 \U0001f600"}, [1, 2]], "dimensions": None}


def test_both_media_types_give_the_same_document() -> None:
    """JSON and msgpack of one document are read alike; msgpack alone carries bytes."""
    assert read_document(json.dumps(DOCUMENT).encode(), JSON) == DOCUMENT
    assert read_document(bytearray(msgpack.packb(DOCUMENT)), MSGPACK) == DOCUMENT
    assert read_document(msgpack.packb({"a": b"\xff"}), MSGPACK) == {"a": b"\xff"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{} {}", "not valid JSON"),
        (b"\xff", "not valid UTF-8 at byte 0"),
        (b'\xef\xbb\xbf{"a":1}', "not valid JSON"),
        ('{"a":1}'.encode("utf-16"), "not valid"),
        (b'{"input": 1, "input": 2}', "'input' comes twice"),
        (b'[{"a": {"b": 1, "b": 1}}]', "'b' comes twice"),
        (b'{"\\ud800": 1, "\\ud800": 2}', "comes twice"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b"[" * 100_000 + b"]" * 100_000, "too deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid"),
        (b'{"a": "\x01"}', "not valid JSON"),
    ],
)
def test_bad_json_is_refused(body: bytes, words: str) -> None:
    """Broken, ambiguous and hostile JSON is the caller's mistake."""
    with pytest.raises(MalformedBody, match=words):
        read_document(body, JSON)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "msgpack"),
        (b"\xc1", "msgpack"),
        (msgpack.packb(1) * 2, "msgpack"),
        (b"\x82\xa1a\x01\xa1a\x02", "'a' comes twice"),
        (b"\x81\x01\x02", "msgpack"),
        (b"\x81\xc4\x01a\x02", "keys of an object must be text"),
        (b"\x91" * 100_000, "nested too deep"),
        (b"\xdd\xff\xff\xff\xff", "msgpack"),
        (b"\xa1\xff", "UTF-8"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "extension type 5"),
    ],
)
def test_bad_msgpack_is_refused(body: bytes, words: str) -> None:
    """Broken, ambiguous and hostile msgpack is the caller's mistake."""
    with pytest.raises(MalformedBody, match=words):
        read_document(body, MSGPACK)


def test_media_types() -> None:
    """Parameters and capitals do not matter; no Content-Type means JSON; others are refused."""
    assert media_type(None) == media_type("Application/JSON; charset=utf-8") == JSON
    assert media_type("application/msgpack") == media_type("application/x-msgpack") == MSGPACK
    with pytest.raises(UnsupportedMediaType):
        media_type("text/plain")


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, False),
        ("*/*", False),
        ("application/json", False),
        ("application/msgpack", True),
        ("text/html, application/vnd.msgpack;q=0.9", True),
        ("application/json, application/msgpack", False),
    ],
)
def test_msgpack_is_answered_when_it_is_named_first(accept: str | None, wanted: bool) -> None:
    """Everyone who does not ask for msgpack gets JSON."""
    assert accepts_msgpack(accept) is wanted


def test_callers_names_are_shown_short_and_printable() -> None:
    """A name in an error is neither long nor able to break a log line."""
    assert shown("a" * 100) == "a" * 40 + "..."
    assert shown("a\n\ud800") == r"a\n\ud800"
