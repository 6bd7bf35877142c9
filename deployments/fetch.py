"""Fetches pictures from URLs, and from nowhere that the settings do not allow.

Each connection goes to the address that was resolved and checked for it, so that a name which resolves
differently the next time gains nothing. No cookies, no proxies, no decompression, no connection kept.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from urllib.parse import urljoin

import httpcore

from epd.deployments.addresses import Address, Target, check_url, is_public, parse_address
from epd.deployments.errors import EPDError, UrlFetchFailed, UrlNotAllowed
from epd.deployments.items import ImagePart, ImageUrl, Item
from epd.deployments.settings import FetchSettings

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
_REDIRECTS = {301, 302, 303, 307, 308}
_HEADERS = [("Accept", "image/*,*/*;q=0.1"), ("Accept-Encoding", "identity"), ("User-Agent", "epd")]


async def resolve(host: str, port: int) -> Sequence[str]:
    """Every address of a host, as text. Raises OSError when it has none."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in infos]


class UrlFetcher:
    """Replaces the URLs of items by the pictures that lie there. One for each Ingress replica.

    resolve_host and is_allowed: for tests, which have no public network. ssl_context: for hosts with
    certificates of a private authority; None for those of the public ones.
    """

    def __init__(
        self,
        settings: FetchSettings,
        *,
        resolve_host: Resolve = resolve,
        is_allowed: Callable[[Address], bool] = is_public,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._settings = settings
        self._network = _CheckedNetwork(resolve_host, is_allowed)
        self._ssl_context = ssl_context
        if ssl_context is None and settings.enabled:
            self._ssl_context = httpcore.default_ssl_context()
        self._slots = asyncio.Semaphore(settings.max_concurrent)

    async def fetch(self, items: Sequence[Item]) -> list[Item]:
        """The items with every URL replaced by its picture; each distinct URL is fetched once.

        Raises UrlNotAllowed or UrlFetchFailed naming the first picture that failed; the others are dropped.
        """
        urls: dict[str, ImageUrl] = {}
        for part in _parts(items):
            if isinstance(part, ImageUrl):
                urls.setdefault(part.url, part)
        if not urls:
            return list(items)
        for part in urls.values():
            check_url(part.url, self._settings, part.param)
        budget = _Budget(self._settings.max_bytes_per_request)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(self._fetch_one(part, budget)) for url, part in urls.items()}
        except ExceptionGroup as errors:
            refused, bugs = errors.split(EPDError)
            if bugs is not None:
                raise
            assert refused is not None
            raise refused.exceptions[0] from None
        pictures = {url: task.result() for url, task in tasks.items()}
        return [_with_pictures(item, pictures) for item in items]

    async def _fetch_one(self, part: ImageUrl, budget: _Budget) -> bytes:
        async with self._slots:
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    return await self._follow(part, budget)
            except TimeoutError:
                raise UrlFetchFailed(f"no answer within {self._settings.timeout_s} s", part.param) from None
            except (httpcore.ConnectError, httpcore.NetworkError):
                raise UrlFetchFailed("the host could not be reached", part.param) from None
            except (httpcore.ProtocolError, httpcore.UnsupportedProtocol):
                raise UrlFetchFailed("the host's answer is not valid HTTP", part.param) from None
            except _ForbiddenAddress:
                raise UrlNotAllowed("the URL leads to an address that is not public", part.param) from None

    async def _follow(self, part: ImageUrl, budget: _Budget) -> bytes:
        """Every redirect is checked as the first URL was."""
        url = part.url
        for _ in range(self._settings.max_redirects + 1):
            target = check_url(url, self._settings, part.param)
            async with (
                httpcore.AsyncConnectionPool(
                    network_backend=self._network, ssl_context=self._ssl_context, max_keepalive_connections=0
                ) as pool,
                pool.stream(
                    "GET",
                    httpcore.URL(
                        scheme=target.scheme, host=target.host, port=target.port, target=target.path
                    ),
                    headers=[("Host", target.authority), *_HEADERS],
                ) as response,
            ):
                if response.status == 200:
                    return await self._read(response, part.param, budget)
                location = _header(response, b"location")
                if response.status not in _REDIRECTS or location is None:
                    raise UrlFetchFailed(f"the host answered {response.status}", part.param)
            url = _join(target, location, part.param)
        raise UrlFetchFailed(f"more than {self._settings.max_redirects} redirects", part.param)

    async def _read(self, response: httpcore.Response, param: str, budget: _Budget) -> bytes:
        """The body, dropped as soon as it is known to be larger than a limit."""
        limit = self._settings.max_bytes
        if (_header(response, b"content-encoding") or "identity").lower() != "identity":
            raise UrlFetchFailed("the host sent a compressed body, unasked", param)
        announced = _header(response, b"content-length") or ""
        if announced.isdecimal() and len(announced) < 20 and int(announced) > limit:
            raise UrlFetchFailed(f"the picture has {announced} bytes and at most {limit} are fetched", param)
        body = bytearray()
        async for chunk in response.aiter_stream():
            body += chunk
            budget.take(len(chunk), param)
            if len(body) > limit:
                raise UrlFetchFailed(f"the picture has more than {limit} bytes, the most fetched", param)
        return bytes(body)


class _ForbiddenAddress(Exception):
    """A host has an address that pictures are not fetched from."""


class _Budget:
    """Bytes that one request's pictures may have together."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit

    def take(self, num_bytes: int, param: str) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise UrlFetchFailed(f"the request's pictures have more than {self._limit} bytes together", param)


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects to addresses, not to names: each is resolved, checked and connected to in one place."""

    def __init__(self, resolve_host: Resolve, is_allowed: Callable[[Address], bool]) -> None:
        self._resolve = resolve_host
        self._is_allowed = is_allowed
        self._tcp = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  the interface's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = list(dict.fromkeys(map(parse_address, await self._resolve(host, port))))
        except (OSError, ValueError) as error:  # UnicodeError: a name that cannot be one
            raise httpcore.ConnectError("no such host") from error
        if not all(map(self._is_allowed, addresses)):
            raise _ForbiddenAddress
        failure: Exception = httpcore.ConnectError("no such host")
        for address in addresses:
            try:
                stream = await self._tcp.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
                continue
            peer = parse_address(stream.get_extra_info("server_addr")[0])
            if peer != address:
                await stream.aclose()
                raise _ForbiddenAddress
            return stream
        raise failure


def _parts(items: Sequence[Item]) -> Iterable[object]:
    return (part for item in items for part in item.parts)


def _with_pictures(item: Item, pictures: dict[str, bytes]) -> Item:
    parts = tuple(
        ImagePart(pictures[part.url], part.param) if isinstance(part, ImageUrl) else part
        for part in item.parts
    )
    return replace(item, parts=parts)


def _header(response: httpcore.Response, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in response.headers if key.lower() == name), None)


def _join(target: Target, location: str, param: str) -> str:
    try:
        return urljoin(target.url, location)
    except ValueError:
        raise UrlFetchFailed("the host redirects to no valid URL", param) from None
