"""The README's tables of limits and of errors: each row is provoked over HTTP and answered as it says."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from epd.deployments.errors import Overloaded, StageUnavailable
from epd.deployments.fetch import UrlFetcher
from epd.deployments.http import make_app
from epd.deployments.messages import EmbedReply, RowsMessage, SequenceMessage
from epd.deployments.preparation import ItemPreparer, TokenRules
from epd.deployments.requests import EmbeddingRequest
from epd.deployments.service import Embedded, EmbeddingService
from epd.deployments.settings import Settings
from epd.models.checkpoint import Checkpoint
from epd.models.families import family_of
from epd.models.images import ImagePreprocessor
from tests.deployments.fake_application import FakeApplication
from tests.deployments.fake_host import PICTURE, FakeHost
from tests.deployments.test_api_page import error_classes
from tests.deployments.test_api_page import rows as rows_of_api_page
from tests.deployments.test_fetch import ALLOWED, FakeNames, allow_one_loopback_address
from tests.deployments.test_service import HIDDEN, FakeStages
from tests.models.pictures import png

README = (Path(__file__).parents[2] / "README.md").read_text()


def readme_rows(head: str) -> list[list[str]]:
    """Cells of the table whose first row is `head`."""
    lines = README[README.index(head) :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


LIMITS = readme_rows("| setting | default | beyond it |")
ERRORS = readme_rows("| status | codes |")


class FakeFailingStages(FakeStages):
    """Raises `error` instead of an answer, if there is one."""

    error: Exception | None = None

    async def embed(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage], dimensions: int | None
    ) -> EmbedReply:
        if self.error:
            raise self.error
        return await super().embed(sequences, rows, dimensions)


class EdgeApplication(FakeApplication):
    """Everything before the stages is real: parser, fetching, preparation, deadline."""

    def __init__(self, settings: Settings, checkpoint: Checkpoint) -> None:
        super().__init__(settings, {"KEYS": "one"})
        self.stages = FakeFailingStages()
        family = family_of(checkpoint)
        fetcher = UrlFetcher(
            settings.fetch,
            resolve_host=FakeNames(good_test=[[ALLOWED]]),
            is_allowed=allow_one_loopback_address,
        )
        preparer = ItemPreparer(
            family.make_prompt(checkpoint),
            ImagePreprocessor(checkpoint, max_pixels=settings.limits.max_image_pixels),
            "ns",
            settings.limits,
            TokenRules.of(family, checkpoint.config),
        )
        self._service = EmbeddingService(
            preparer,
            self.stages,
            self.stages,
            hidden_size=HIDDEN,
            request_timeout_s=settings.limits.request_timeout_s,
            fetch_urls=fetcher.fetch if settings.fetch.enabled else None,
        )

    async def embed_request(self, request: EmbeddingRequest) -> Embedded:
        return await self._service.embed(request.items, request.dimensions, request.cache_salt)


Answer = tuple[int, str | None]


@dataclass
class Caller:
    """Sends requests to an application under given settings; an answer is its status and its code."""

    checkpoint: Checkpoint
    port: int
    stages: Callable[[FakeFailingStages], None] = lambda stages: None
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": "Bearer one"})

    async def ask(self, settings: Mapping[str, Any], *bodies: Any, path: str = "/v1/embeddings") -> Answer:
        """The answer to the last of the bodies; bytes are sent as they are, None is a GET."""
        application = EdgeApplication(Settings.model_validate(settings), self.checkpoint)
        self.stages(application.stages)
        transport = httpx.ASGITransport(make_app(lambda: application), raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=self.headers
        ) as client:
            for body in bodies:
                if body is None:
                    answer = await client.get(path)
                elif isinstance(body, bytes):
                    answer = await client.post(path, content=body)
                else:
                    answer = await client.post(path, json=body)
        return answer.status_code, answer.json().get("error", {}).get("code")

    def url(self, path: str) -> dict[str, Any]:
        return {"input": {"image": f"http://good.test:{self.port}{path}"}}

    def fetch(self, **limits: Any) -> dict[str, Any]:
        """Settings under which the test's host may be fetched from."""
        hosts = [f"good.test:{self.port}"]
        return {"fetch": {"enabled": True, "hosts": hosts, "schemes": ["http"], **limits}}


@pytest.fixture(scope="module")
def checkpoint(demo_folder: Path) -> Checkpoint:
    return Checkpoint.open(demo_folder)


@pytest.fixture
async def caller(checkpoint: Checkpoint) -> AsyncIterator[Caller]:
    async with FakeHost(ALLOWED) as host:
        yield Caller(checkpoint, host.port)


def image(width: int, height: int) -> dict[str, Any]:
    return {"input": {"image": base64.b64encode(png(width, height)).decode()}}


def hang(stages: FakeFailingStages) -> None:
    stages.hang = True


A = {"input": "a"}
TWO_ITEMS = {"max_tokens_per_item": 10, "max_tokens_per_request": 20}
ONE_A_MINUTE: dict[str, Any] = {"keys_env": "KEYS", "requests_per_minute": 1}


async def within_and_beyond(caller: Caller, name: str) -> tuple[Answer, Answer]:
    """Answers to a request just within a limit, and to one just beyond it."""
    ask, fetch, url = caller.ask, caller.fetch, caller.url
    room, _, key = name.partition(".")

    def set_to(value: Any) -> dict[str, Any]:
        return fetch(**{key: value}) if room == "fetch" else {room: {key: value}}

    size = len(PICTURE)
    match key:
        case "max_items":
            return await ask(set_to(1), {"input": ["a"]}), await ask(set_to(1), {"input": ["a", "b"]})
        case "max_tokens_per_item":
            return await ask(set_to(9), {"input": [1] * 9}), await ask(set_to(9), {"input": [1] * 10})
        case "max_tokens_per_request":
            settings = {"limits": TWO_ITEMS}
            return await ask(settings, {"input": [[1] * 10] * 2}), await ask(
                settings, {"input": [[1] * 10] * 3}
            )
        case "max_text_chars_per_item":
            return await ask(set_to(5), {"input": "a" * 5}), await ask(set_to(5), {"input": "a" * 6})
        case "max_body_bytes":
            return await ask(set_to(13), b'{"input":"a"}'), await ask(set_to(13), b'{"input": "a"}')
        case "max_image_pixels":
            return await ask(set_to(3000), image(60, 50)), await ask(set_to(3000), image(60, 51))
        case "request_timeout_s":
            answered = await ask(set_to(30), A)
            caller.stages = hang
            return answered, await ask(set_to(0.05), A)
        case "requests_per_minute":
            settings = {"auth": {**ONE_A_MINUTE, "burst": 1}}
            return await ask(settings, A), await ask(settings, A, A)
        case "burst":
            settings = {"auth": {**ONE_A_MINUTE, "burst": 2}}
            return await ask(settings, A, A), await ask(settings, A, A, A)
        case "max_bytes":
            return await ask(set_to(size), url("/picture")), await ask(set_to(size - 1), url("/picture"))
        case "max_bytes_per_request":
            two = {"input": [url("/picture?1")["input"], url("/picture?2")["input"]]}
            return await ask(set_to(2 * size), two), await ask(set_to(2 * size - 1), two)
        case "max_redirects":
            return await ask(set_to(1), url("/cookie")), await ask(set_to(0), url("/cookie"))
        case "timeout_s":
            return await ask(set_to(30), url("/picture")), await ask(set_to(0.05), url("/mute"))
    raise AssertionError(f"no request for {name}")


@pytest.mark.parametrize(("name", "default", "beyond"), LIMITS, ids=[row[0] for row in LIMITS])
async def test_each_limit_holds(caller: Caller, name: str, default: str, beyond: str) -> None:
    """The default is the settings' own; what is within is answered, what is beyond as the table says."""
    room, _, key = name.strip("`").partition(".")
    value = getattr(getattr(Settings(), room), key)
    assert default == ("none" if value is None else str(value))
    if beyond == "the rest wait":  # no error: see test_fetch.py
        return
    said = re.match(r"(\d+) `(\w+)`", beyond)
    assert said is not None
    within, answer = await within_and_beyond(caller, f"{room}.{key}")
    assert answer == (int(said[1]), said[2])
    # What is fetched from the test's host is no picture, which is found later.
    assert within == ((400, "invalid_value") if room == "fetch" else (200, None))


async def provoke(caller: Caller, code: str) -> Answer:
    """The answer to a request that has this error."""
    ask = caller.ask
    match code:
        case "invalid_value":
            return await ask({}, {"input": 1.5})
        case "malformed_body":
            return await ask({}, b"{")
        case "unsupported_field":
            return await ask({}, {**A, "normalize": False})
        case "model_not_found":
            return await ask({}, {**A, "model": "other"})
        case "url_not_allowed":
            return await ask({}, {"input": {"image": "https://example.org/"}})
        case "url_fetch_failed":
            return await ask(caller.fetch(), caller.url("/missing"))
        case "invalid_api_key":
            caller.headers = {"Authorization": "Bearer other"}
            return await ask({"auth": {"keys_env": "KEYS"}}, A)
        case "not_found":
            return await ask({}, None, path="/v1/nothing")
        case "method_not_allowed":
            return await ask({}, None)
        case "unsupported_media_type":
            caller.headers = {"Content-Type": "text/plain"}
            return await ask({}, b"a")
        case "overloaded" | "stage_unavailable" | "internal_error":
            errors = {"overloaded": Overloaded("full"), "stage_unavailable": StageUnavailable("gone")}
            error = errors.get(code, KeyError("secret"))
            caller.stages = lambda stages: setattr(stages, "error", error)
            return await ask({}, A)
    limits = {"input_too_long": "limits.max_tokens_per_item", "payload_too_large": "limits.max_body_bytes"}
    limits |= {"rate_limit_exceeded": "auth.burst", "deadline_exceeded": "limits.request_timeout_s"}
    return (await within_and_beyond(caller, limits[code]))[1]


CODES = [code for _, codes in ERRORS for code in re.findall(r"`(\w+)`", codes)]


@pytest.mark.parametrize("code", CODES)
async def test_each_error_is_answered(caller: Caller, code: str) -> None:
    """A request that has the error is answered by its code, under the status of its row."""
    status, answered = await provoke(caller, code)
    (expected,) = [status for status, codes in ERRORS if f"`{code}`" in codes]
    assert (str(status), answered) == (expected, code)


def test_the_readme_says_what_the_api_page_says() -> None:
    """The same limits, defaults and codes, and every error of the tree."""
    api = [
        (name, default, re.split("[,;]", beyond)[0]) for name, default, beyond in rows_of_api_page("Limits")
    ]
    assert [(name, default, re.split("[,;]", beyond)[0]) for name, default, beyond in LIMITS] == api
    assert set(CODES) == {row[1].strip("`") for row in rows_of_api_page("Errors")}
    assert {each.code for each in error_classes()} <= set(CODES)
