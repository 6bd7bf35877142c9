"""Pictures as callers send them: bytes, base64, data URIs and URLs."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass

from epd.deployments.errors import RequestError, UrlNotAllowed

_DATA_URI = re.compile(
    r"data:(?:[\w.+-]+/[\w.+-]+)?(?:;[\w-]+=[^;,]*)*(?P<base64>;base64)?,", re.ASCII | re.IGNORECASE
)
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*):", re.ASCII | re.IGNORECASE)
# Characters decoded in one go: the decoder holds the interpreter's lock, so a picture of many MiB is decoded
# in steps of about a millisecond, between which the event loop runs. A multiple of four.
_BASE64_STEP = 512 * 1024


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An encoded picture, as received. `param` is its path in the request, for errors."""

    data: bytes
    param: str


@dataclass(frozen=True, slots=True)
class ImageUrl:
    """A picture still to be fetched from an http(s) URL. `param` is its path in the request, for errors."""

    url: str
    param: str


def read_picture(value: object, param: str, *, allow_urls: bool, bare: bool = True) -> ImagePart | ImageUrl:
    """A picture from bytes, a data URI, a URL, or where `bare` from base64 alone.

    Raises RequestError, or UrlNotAllowed for a URL that this server does not fetch.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, str):
        scheme = _SCHEME.match(value)
        if scheme and scheme["scheme"].lower() == "data":
            data = _from_data_uri(value, param)
        elif scheme:
            return _url(value, scheme["scheme"].lower(), param, allow_urls)
        elif bare:
            data = decode_base64(value, 0, param)
        else:
            raise RequestError("expected a data URI", param)
    else:
        raise RequestError(f"expected a picture, got {kind(value)}", param)
    if not data:
        raise RequestError("the picture is empty", param)
    return ImagePart(data, param)


def decode_base64(value: str, start: int, param: str) -> bytes:
    """The bytes that `value[start:]` spells. Raises RequestError for anything but strict base64."""
    pieces = []
    try:
        for begin in range(start, len(value), _BASE64_STEP):
            piece = value[begin : begin + _BASE64_STEP]
            if begin + _BASE64_STEP < len(value) and piece.endswith("="):
                raise RequestError("not valid base64: padding before its end", param)
            pieces.append(binascii.a2b_base64(piece, strict_mode=True))
    except ValueError:  # binascii.Error, and characters that are not ASCII
        raise RequestError("not valid base64", param) from None
    return b"".join(pieces)


def kind(value: object) -> str:
    """What a caller sent instead of what was expected."""
    return "nothing" if value is None else type(value).__name__


def _from_data_uri(value: str, param: str) -> bytes:
    head = _DATA_URI.match(value)
    if head is None or not head["base64"]:
        raise RequestError("a data URI must be `data:<type>;base64,<data>`", param)
    return decode_base64(value, head.end(), param)


def _url(value: str, scheme: str, param: str, allow_urls: bool) -> ImageUrl:
    if scheme not in ("http", "https"):
        raise UrlNotAllowed("a picture's URL must be http or https", param)
    if not allow_urls:
        raise UrlNotAllowed("picture URLs are not fetched by this server: send a data URI", param)
    return ImageUrl(value, param)
