"""Which hosts and network addresses pictures may be fetched from."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from epd.deployments.errors import UrlNotAllowed
from epd.deployments.settings import FetchSettings

Address = IPv4Address | IPv6Address
DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL_LENGTH = 8192
# IPv6 networks whose last 32 bits are an IPv4 address that a gateway would reach (RFC 6052, RFC 8215).
_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))


@dataclass(frozen=True, slots=True)
class Target:
    """Where one request of a fetch goes, in parts that nothing reads a second time."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """For resolving redirects relative to it."""
        return f"{self.scheme}://{self.authority}{self.path}"


def check_url(url: str, settings: FetchSettings, param: str) -> Target:
    """The target of a URL whose scheme, host and port are allowed. Raises UrlNotAllowed."""
    if len(url) > MAX_URL_LENGTH:
        raise UrlNotAllowed(
            f"the URL has {len(url)} characters, and at most {MAX_URL_LENGTH} are taken", param
        )
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise UrlNotAllowed("the URL must be printable ASCII: percent-encode the rest", param)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UrlNotAllowed("not a valid URL", param) from None
    if parts.scheme not in settings.schemes:
        raise UrlNotAllowed(f"the URL's scheme must be {' or '.join(settings.schemes)}", param)
    if not host or "@" in parts.netloc or "%" in parts.netloc:
        raise UrlNotAllowed("the URL must name a host, and neither user nor password", param)
    target = Target(
        parts.scheme,
        host.lower().rstrip("."),
        DEFAULT_PORTS[parts.scheme] if port is None else port,
        (parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
    )
    if not any(_matches(pattern, target) for pattern in settings.hosts):
        raise UrlNotAllowed("the URL's host is not on this server's list", param)
    return target


def is_public(address: Address) -> bool:
    """Whether the address is one of the public internet, also where it wraps an IPv4 address."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    if isinstance(address, IPv4Address):
        return True
    inner = [address.sixtofour, *(address.teredo or ())]
    if any(address in network for network in _NAT64):
        inner.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return not address.is_site_local and all(is_public(each) for each in inner if each is not None)


def parse_address(text: str) -> Address:
    """An address as the resolver writes it. Raises ValueError."""
    return ip_address(text)


def _matches(pattern: str, target: Target) -> bool:
    name, _, port = pattern.partition(":")
    if target.port != (int(port) if port else DEFAULT_PORTS[target.scheme]):
        return False
    if name == "*":
        return True
    if name.startswith("*."):
        return target.host.endswith(name[1:])
    return target.host == name
