"""Embedding through a service, over a loopback server that plays it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgpack
import numpy as np
import pytest

from epd.cli.embedders import CannotEmbed, Failed
from epd.cli.remote import RemoteEmbedder

Answer = tuple[int, dict[str, Any], dict[str, str]]
ITEMS = [{"text": "a"}, {"text": "bb"}, {"text": "ccc"}]


def good_answer(document: dict[str, Any]) -> Answer:
    """A vector of each text's length."""
    data = [{"embedding": np.array([len(item["text"])], "<f4").tobytes()} for item in document["input"]]
    return 200, {"data": data}, {}


def refusal(status: int, message: str, param: str | None = None, **headers: str) -> Answer:
    return status, {"error": {"message": message, "param": param}}, headers


class FakeService:
    """Answers each request by `answer(document)`; remembers documents and headers."""

    def __init__(self) -> None:
        self.documents: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[dict[str, Any]], Answer] = good_answer
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                document = msgpack.unpackb(self.rfile.read(int(self.headers["Content-Length"])))
                service.documents.append(document)
                service.headers.append(dict(self.headers))
                status, body, headers = service.answer(document)
                raw = msgpack.packb(body) if status == 200 else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(raw))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/"


@pytest.fixture
def service() -> Iterator[FakeService]:
    service = FakeService()
    thread = threading.Thread(target=service.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


def values(results: list[Any]) -> list[Any]:
    return [result if isinstance(result, Failed) else result.tolist() for result in results]


def test_items_options_and_key_travel(service: FakeService) -> None:
    """One request, msgpack both ways, with the options and the key."""
    results = RemoteEmbedder(service.url, "secret", {"dimensions": 1})(ITEMS)
    assert values(results) == [[1], [2], [3]]
    assert service.documents == [{"dimensions": 1, "input": ITEMS}]
    assert service.headers[0]["Authorization"] == "Bearer secret"
    assert service.headers[0]["Accept"] == "application/msgpack"


def test_a_refused_item_fails_alone(service: FakeService) -> None:
    """The item that the error names gets its reason; the others are sent again without it."""

    def answer(document: dict[str, Any]) -> Answer:
        texts = [item["text"] for item in document["input"]]
        if "bb" in texts:
            return refusal(400, "unreadable", f"input[{texts.index('bb')}].image")
        return good_answer(document)

    service.answer = answer
    assert values(RemoteEmbedder(service.url, None, {})(ITEMS)) == [[1], Failed("unreadable"), [3]]


def test_a_batch_too_large_is_sent_one_by_one(service: FakeService) -> None:
    """A 413 for many is no reason to lose those that fit."""

    def answer(document: dict[str, Any]) -> Answer:
        size = sum(len(item["text"]) for item in document["input"])
        return refusal(413, "too large") if size > 2 else good_answer(document)

    service.answer = answer
    assert values(RemoteEmbedder(service.url, None, {})(ITEMS)) == [[1], [2], Failed("too large")]


def test_a_busy_service_is_asked_again_when_it_says(service: FakeService) -> None:
    """429 and 503 are waited out, for as long as Retry-After says."""
    answers = iter([refusal(429, "full", **{"Retry-After": "3"}), refusal(503, "gone")])
    service.answer = lambda document: next(answers, None) or good_answer(document)
    slept: list[float] = []
    results = RemoteEmbedder(service.url, None, {}, sleep=slept.append)(ITEMS)
    assert (values(results), slept) == ([[1], [2], [3]], [3.0, 1.0])


def test_patience_ends(service: FakeService) -> None:
    """A service that stays busy is given up after `max_tries`."""
    service.answer = lambda _: refusal(503, "gone")
    with pytest.raises(CannotEmbed, match="answered 503: gone"):
        RemoteEmbedder(service.url, None, {}, max_tries=2, sleep=lambda _: None)(ITEMS)
    assert len(service.documents) == 2


@pytest.mark.parametrize("param", ["model", None])
def test_a_refusal_of_the_whole_request_ends_the_run(service: FakeService, param: str | None) -> None:
    """What is no item's fault is not tried item by item."""
    service.answer = lambda _: refusal(400 if param else 401, "no", param)
    with pytest.raises(CannotEmbed, match="no"):
        RemoteEmbedder(service.url, None, {})(ITEMS)
    assert len(service.documents) == 1
