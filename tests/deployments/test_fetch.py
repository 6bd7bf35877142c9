"""Pictures from URLs: what is fetched, and what is never even connected to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from epd.deployments.addresses import Address
from epd.deployments.errors import RequestError, UrlFetchFailed, UrlNotAllowed
from epd.deployments.fetch import UrlFetcher
from epd.deployments.items import ImagePart, ImageUrl, Item
from epd.deployments.settings import FetchSettings
from tests.deployments.certificates import contexts_for
from tests.deployments.fake_host import PICTURE, FakeHost

ALLOWED, FORBIDDEN = "127.0.0.1", "127.0.0.2"


class FakeNames:
    """Resolves each name to its next answer; the last one stays. Counts the questions."""

    def __init__(self, **answers: Sequence[Sequence[str]]) -> None:
        self._answers = {name.replace("_", "."): list(each) for name, each in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, _port: int) -> Sequence[str]:
        self.asked.append(host)
        answers = self._answers.get(host)
        if answers is None:
            raise OSError("no such host")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def allow_one_loopback_address(address: Address) -> bool:
    """Tests have no public network: this address plays its part, and every other is forbidden."""
    return str(address) == ALLOWED


@pytest.fixture
async def host() -> AsyncIterator[FakeHost]:
    """good.test, at the address that plays a public one."""
    async with FakeHost(ALLOWED) as host:
        yield host


@pytest.fixture
async def forbidden() -> AsyncIterator[FakeHost]:
    """evil.test, at an address that must see no connection."""
    async with FakeHost(FORBIDDEN) as forbidden:
        yield forbidden
        assert forbidden.connections == 0


def fetcher(*ports: int, names: FakeNames | None = None, **settings: object) -> UrlFetcher:
    """Both names are on the list, so that only addresses keep them apart."""
    hosts = [f"{name}:{port}" for name in ("good.test", "evil.test", ALLOWED, FORBIDDEN) for port in ports]
    document = {"enabled": True, "hosts": hosts, "schemes": ("http", "https"), **settings}
    return UrlFetcher(
        FetchSettings.model_validate(document),
        resolve_host=names or FakeNames(good_test=[[ALLOWED]], evil_test=[[FORBIDDEN]]),
        is_allowed=allow_one_loopback_address,
    )


def item(*urls: str) -> Item:
    return Item(tuple(ImageUrl(url, f"input.image[{i}]") for i, url in enumerate(urls)), "input")


async def fetch(fetcher: UrlFetcher, *urls: str) -> list[bytes]:
    (fetched,) = await fetcher.fetch([item(*urls)])
    return [part.data for part in fetched.parts if isinstance(part, ImagePart)]


async def test_a_picture_is_fetched_with_its_path(host: FakeHost) -> None:
    """The URL's part becomes the picture, in its place; text and other pictures stay."""
    url = ImageUrl(f"http://good.test:{host.port}/picture", "input[0].content[1]")
    items = [Item(("a", url, ImagePart(b"x", "p")), "input[0]"), Item(("b",), "input[1]")]
    fetched = await fetcher(host.port).fetch(items)
    assert fetched[0].parts == ("a", ImagePart(PICTURE, "input[0].content[1]"), ImagePart(b"x", "p"))
    assert fetched[1] == items[1]
    assert f"Host: good.test:{host.port}" in host.requests[0]


async def test_a_url_named_twice_is_fetched_once(host: FakeHost) -> None:
    """Equal URLs of a request share one fetch."""
    url = f"http://good.test:{host.port}/picture"
    assert await fetch(fetcher(host.port), url, url) == [PICTURE, PICTURE]
    assert host.connections == 1


async def test_redirects_are_followed_where_they_are_allowed(host: FakeHost) -> None:
    """Relative and absolute redirects to allowed places; cookies set on the way are not sent back."""
    base = f"http://good.test:{host.port}"
    one = fetcher(host.port)
    assert await fetch(one, f"{base}/redirect?to={base}/cookie") == [PICTURE]
    assert not any("cookie:" in head.lower() for head in host.requests)


async def test_no_proxy_of_the_environment_is_used(
    host: FakeHost, forbidden: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would resolve names by itself, and connect to what was never checked."""
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{FORBIDDEN}:{forbidden.port}")
    assert await fetch(fetcher(host.port), f"http://good.test:{host.port}/picture") == [PICTURE]


@pytest.mark.parametrize("literal", [False, True])
async def test_a_forbidden_address_is_never_connected_to(forbidden: FakeHost, literal: bool) -> None:
    """A listed host at a private address is refused, by name or as a literal, before any connection."""
    names = FakeNames(evil_test=[[FORBIDDEN]], **{FORBIDDEN.replace(".", "_"): [[FORBIDDEN]]})
    url = f"http://{FORBIDDEN if literal else 'evil.test'}:{forbidden.port}/picture"
    with pytest.raises(UrlNotAllowed, match="not public"):
        await fetch(fetcher(forbidden.port, names=names), url)


async def test_one_forbidden_address_among_several_is_enough(host: FakeHost, forbidden: FakeHost) -> None:
    """A name with a public and a private address is refused: neither is connected to."""
    names = FakeNames(good_test=[[ALLOWED, FORBIDDEN]])
    with pytest.raises(UrlNotAllowed):
        await fetch(fetcher(host.port, names=names), f"http://good.test:{host.port}/picture")
    assert host.connections == 0


@pytest.mark.parametrize("via", ["evil.test", FORBIDDEN])
async def test_a_redirect_to_a_forbidden_address_is_refused(
    host: FakeHost, forbidden: FakeHost, via: str
) -> None:
    """Every redirect is resolved and checked as the first URL was."""
    names = FakeNames(
        good_test=[[ALLOWED]], evil_test=[[FORBIDDEN]], **{FORBIDDEN.replace(".", "_"): [[FORBIDDEN]]}
    )
    url = f"http://good.test:{host.port}/redirect?to=http://{via}:{forbidden.port}/picture"
    with pytest.raises(UrlNotAllowed):
        await fetch(fetcher(host.port, forbidden.port, names=names), url)
    assert host.connections == 1


@pytest.mark.parametrize(
    "to", ["http://other.test/picture", "file:///etc/passwd", "http://good.test/picture", "//["]
)
async def test_a_redirect_off_the_list_is_refused(host: FakeHost, to: str) -> None:
    """Redirects to unlisted hosts, ports and schemes end the fetch."""
    with pytest.raises(RequestError):
        await fetch(fetcher(host.port), f"http://good.test:{host.port}/redirect?to={to}")
    assert host.connections == 1


async def test_a_name_that_changes_its_address_gains_nothing(host: FakeHost, forbidden: FakeHost) -> None:
    """The address that was checked is the one connected to: a name is resolved once for each connection."""
    names = FakeNames(good_test=[[ALLOWED], [FORBIDDEN]])
    one = fetcher(host.port, forbidden.port, names=names)
    assert await fetch(one, f"http://good.test:{host.port}/picture") == [PICTURE]
    assert names.asked == ["good.test"]
    with pytest.raises(UrlNotAllowed, match="not public"):
        await fetch(one, f"http://good.test:{forbidden.port}/picture")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/missing", "answered 404"),
        ("/loop", "more than 3 redirects"),
        ("/endless", "more than 10000 bytes"),
        ("/announced", "10000000000 bytes and at most 10000"),
        ("/gzip", "compressed"),
        ("/garbage", "not valid HTTP"),
        ("/headers", "not valid HTTP"),
    ],
)
async def test_bad_answers_are_refused(host: FakeHost, path: str, words: str) -> None:
    """Error statuses, endless bodies and what is no HTTP end the fetch with the picture's path."""
    with pytest.raises(UrlFetchFailed, match=words) as raised:
        await fetch(fetcher(host.port, max_bytes=10_000), f"http://good.test:{host.port}{path}")
    assert raised.value.param == "input.image[0]"


@pytest.mark.parametrize("path", ["/slow", "/mute"])
async def test_a_slow_host_is_given_up(host: FakeHost, path: str) -> None:
    """The time cap holds from the name to the last byte."""
    with pytest.raises(UrlFetchFailed, match=r"within 0\.05 s"):
        await fetch(fetcher(host.port, timeout_s=0.05), f"http://good.test:{host.port}{path}")


async def test_a_requests_pictures_are_bounded_together(host: FakeHost) -> None:
    """Many pictures, each within its cap, cannot add up to more than the request's."""
    urls = [f"http://good.test:{host.port}/picture?{i}" for i in range(4)]
    with pytest.raises(UrlFetchFailed, match="together"):
        await fetch(fetcher(host.port, max_bytes_per_request=3 * len(PICTURE)), *urls)


async def test_concurrent_connections_are_bounded(host: FakeHost) -> None:
    """No more than `max_concurrent` pictures are fetched at a time; the rest wait."""
    urls = [f"http://good.test:{host.port}/picture?{i}" for i in range(12)]
    assert await fetch(fetcher(host.port, max_concurrent=3), *urls) == [PICTURE] * 12
    assert host.most_open <= 3


async def test_an_unknown_host_is_a_failed_fetch() -> None:
    """A name that does not resolve, and a port where nobody listens."""
    async with FakeHost(ALLOWED) as gone:
        pass
    with pytest.raises(UrlFetchFailed, match="reached"):
        await fetch(fetcher(1, names=FakeNames()), "http://good.test:1/picture")
    with pytest.raises(UrlFetchFailed, match="reached"):
        await fetch(fetcher(gone.port), f"http://good.test:{gone.port}/picture")


async def test_the_default_rules_refuse_loopback(host: FakeHost) -> None:
    """Without a test's own argument nothing reaches this machine, by its name or by its number."""
    settings = FetchSettings(
        enabled=True, hosts=(f"localhost:{host.port}", f"{ALLOWED}:{host.port}"), schemes=("http",)
    )
    for name in ("localhost", ALLOWED):
        with pytest.raises(UrlNotAllowed, match="not public"):
            await fetch(UrlFetcher(settings), f"http://{name}:{host.port}/picture")
    assert host.connections == 0


async def test_https_checks_the_certificate_of_the_name() -> None:
    """The connection goes to an address, but the certificate must be the name's."""
    server, client = contexts_for("good.test")
    settings = FetchSettings(enabled=True, hosts=("good.test:4430", "other.test:4430"))
    async with FakeHost(ALLOWED, ssl_context=server) as host:
        settings = FetchSettings(enabled=True, hosts=(f"good.test:{host.port}", f"other.test:{host.port}"))
        one = UrlFetcher(
            settings,
            resolve_host=FakeNames(good_test=[[ALLOWED]], other_test=[[ALLOWED]]),
            is_allowed=allow_one_loopback_address,
            ssl_context=client,
        )
        assert await fetch(one, f"https://good.test:{host.port}/picture") == [PICTURE]
        with pytest.raises(UrlFetchFailed, match="reached"):
            await fetch(one, f"https://other.test:{host.port}/picture")


async def test_a_failure_ends_the_other_fetches(host: FakeHost) -> None:
    """The first picture that fails answers the request; slow others are dropped."""
    base = f"http://good.test:{host.port}"
    async with asyncio.timeout(20):
        with pytest.raises(UrlFetchFailed, match="404"):
            await fetch(fetcher(host.port, timeout_s=60), f"{base}/mute", f"{base}/missing")
