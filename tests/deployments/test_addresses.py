"""Which URLs and addresses pictures may come from."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from epd.deployments.addresses import Target, check_url, is_public, parse_address
from epd.deployments.errors import UrlNotAllowed
from epd.deployments.settings import FetchSettings

SETTINGS = FetchSettings(enabled=True, hosts=("example.org", "*.cdn.example", "files.test:8443"))
ANY = FetchSettings(enabled=True, hosts=("*",), schemes=("https", "http"))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://example.org", Target("https", "example.org", 443, "/")),
        ("https://EXAMPLE.org.:443/a?b=c#d", Target("https", "example.org", 443, "/a?b=c")),
        ("https://a.b.cdn.example/x", Target("https", "a.b.cdn.example", 443, "/x")),
        ("https://files.test:8443/x", Target("https", "files.test", 8443, "/x")),
    ],
)
def test_listed_hosts_are_allowed(url: str, target: Target) -> None:
    """Exact names, names below a wildcard, and a port where it is listed; case and fragment do not matter."""
    assert check_url(url, SETTINGS, "input") == target


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/",
        "ftp://example.org/",
        "https://example.org:8443/",
        "https://files.test/",
        "https://cdn.example/",
        "https://badcdn.example/",
        "https://example.org.evil.test/",
        "https://evil.test/?https://example.org/",
        "https://user@example.org/",
        "https://example.org@evil.test/",
        "https://evil.test\\@example.org/",
        "https://example.org%2eevil.test/",
        "https://example.org\n/",
        "https://exämple.org/",
        "https://example.org:99999/",
        "https://[::1/",
        "https:///a",
        "https:example.org",
        f"https://example.org/{'a' * 9000}",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    """Unlisted hosts, schemes and ports, credentials, and what parsers could read differently."""
    with pytest.raises(UrlNotAllowed):
        check_url(url, SETTINGS, "input")


def test_the_host_header_holds_ports_and_brackets() -> None:
    """A port that is not the scheme's own is named, and IPv6 is in brackets."""
    assert check_url("https://files.test:8443/", SETTINGS, "").authority == "files.test:8443"
    assert check_url("http://[2606:4700::1111]/a", ANY, "").url == "http://[2606:4700::1111]/a"


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::1"])
def test_public_addresses(address: str) -> None:
    """Addresses of the public internet, also those that wrap one."""
    assert is_public(parse_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1",
    ],
)  # fmt: skip
def test_private_addresses(address: str) -> None:
    """Loopback, private, link-local, multicast and reserved ones, also where IPv6 wraps them."""
    assert not is_public(parse_address(address))


@pytest.mark.parametrize(
    "hosts", [(), ("https://example.org",), ("EXAMPLE.org",), ("a b",), ("*.*.org",), ("",)]
)
def test_settings_refuse_what_is_no_host(hosts: tuple[str, ...]) -> None:
    """A list that could not match as its writer meant is refused before start."""
    with pytest.raises(ValidationError, match=r"fetch\.hosts"):
        FetchSettings(enabled=True, hosts=hosts)
