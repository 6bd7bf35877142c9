"""Embeds through a running service: msgpack both ways, so that pictures and vectors travel as they are."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np

from epd.cli.embedders import CannotEmbed, Failed, Vector
from epd.cli.files import Item

_MSGPACK = "application/msgpack"
_ITEM = re.compile(r"input\[(\d+)\]")
_AGAIN = {429, 503}


class RemoteEmbedder:
    """`Embed` over HTTP. An item that the service refuses fails alone; the others are sent again without it.

    options: fields of every request. sleep: waits between tries, in seconds.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        options: dict[str, Any],
        *,
        max_tries: int = 6,
        timeout_s: float = 300,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": _MSGPACK, "Accept": _MSGPACK}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._options = options
        self._max_tries = max_tries
        self._timeout_s = timeout_s
        self._sleep = sleep

    def __call__(self, items: Sequence[Item]) -> list[Vector | Failed]:
        results: dict[int, Vector | Failed] = {}
        while pending := [i for i in range(len(items)) if i not in results]:
            status, answer = self._send([items[i] for i in pending])
            if status == 200:
                for i, entry in zip(pending, answer["data"], strict=True):
                    results[i] = np.frombuffer(entry["embedding"], "<f4").astype(np.float32)
                continue
            error = answer.get("error", {})
            message = str(error.get("message", f"status {status}"))
            place = _ITEM.match(str(error.get("param")))
            if status == 400 and place and int(place[1]) < len(pending):
                results[pending[int(place[1])]] = Failed(message)
            elif status in (400, 413) and len(pending) == 1:
                results[pending[0]] = Failed(message)
            elif status == 413:
                for i in pending:
                    (results[i],) = self([items[i]])
            else:
                raise CannotEmbed(f"{self._url} answered {status}: {message}")
        return [results[i] for i in range(len(items))]

    def _send(self, items: Sequence[Item]) -> tuple[int, Any]:
        """Status and document; tries again while the service asks for it."""
        body = msgpack.packb({**self._options, "input": list(items)})
        for tries_left in reversed(range(self._max_tries)):
            request = urllib.request.Request(f"{self._url}/v1/embeddings", body, self._headers)
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    return 200, msgpack.unpackb(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    if error.code in _AGAIN and tries_left:
                        self._sleep(_seconds(error.headers.get("Retry-After")))
                        continue
                    return error.code, _document(error.read())
            except OSError as error:  # URLError and timeouts among them
                raise CannotEmbed(
                    f"no service answers at {self._url} ({error}): start one with `epd serve`, or use --local"
                ) from error
        raise AssertionError("the loop returns or raises")


def _seconds(retry_after: str | None) -> float:
    return float(retry_after) if retry_after and retry_after.isdecimal() else 1.0


def _document(body: bytes) -> Any:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
