"""Who may ask: API keys, their rate limits, and the salt that keeps their caches apart."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from epd.deployments.errors import Unauthorized
from epd.deployments.rate_limit import TokenBucket
from epd.deployments.settings import AuthSettings

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `tenant`: keeps this caller's cached pictures apart; None when they are shared."""

    tenant: str | None = None

    def salt(self, cache_salt: str | None) -> str | None:
        """The salt of this caller's pictures, given the request's own."""
        if self.tenant is None:
            return cache_salt
        # The tenant has a fixed length, so that no two callers reach the same salt by their own choice.
        return self.tenant if cache_salt is None else f"{self.tenant}/{cache_salt}"


class Gate:
    """Checks the API key of each request, and how often that key asks. One for each Ingress replica."""

    def __init__(
        self,
        settings: AuthSettings,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError when keys are asked for and there are none."""
        self._isolate = settings.isolate_cache
        self._digests = [_digest(key) for key in read_keys(settings, environ)]
        self._buckets: dict[bytes, TokenBucket] = {}
        if settings.requests_per_minute is not None:
            self._buckets = {
                digest: TokenBucket(settings.requests_per_minute, settings.burst, clock)
                for digest in self._digests
            }

    def identify(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header. Raises Unauthorized."""
        return self._caller(self._find(authorization))

    def admit(self, authorization: str | None) -> Caller:
        """As `identify`, for a request that counts. Raises Unauthorized or RateLimited."""
        digest = self._find(authorization)
        if digest is not None and (bucket := self._buckets.get(digest)):
            bucket.take()
        return self._caller(digest)

    def _find(self, authorization: str | None) -> bytes | None:
        """Digest of the key in the header; every known key is compared, each in constant time."""
        if not self._digests:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("send an API key as `Authorization: Bearer KEY`")
        given = _digest(key.strip())
        found = [digest for digest in self._digests if hmac.compare_digest(digest, given)]
        if not found:
            raise Unauthorized("the API key is not known")
        return found[0]

    def _caller(self, digest: bytes | None) -> Caller:
        return Caller(digest.hex() if digest is not None and self._isolate else None)


def read_keys(settings: AuthSettings, environ: Mapping[str, str]) -> list[str]:
    """The keys that the settings name, each once; empty when they ask for none.

    Raises ValueError, without any key in it, when a source cannot be read or holds no key.
    """
    keys: list[str] = []
    if settings.keys_file is not None:
        try:
            lines = Path(settings.keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not valid UTF-8"
            raise ValueError(f"cannot read auth.keys_file {settings.keys_file}: {reason}") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ValueError(f"auth.keys_file {settings.keys_file} holds no key")
        keys += found
    if settings.keys_env is not None:
        found = environ.get(settings.keys_env, "").replace(",", " ").split()
        if not found:
            raise ValueError(f"auth.keys_env names {settings.keys_env}, which holds no key")
        keys += found
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("an API key must be printable ASCII without blanks, as a header carries it")
    return list(dict.fromkeys(keys))


def _digest(key: str) -> bytes:
    """Fixed length, so that comparing two says nothing of their lengths."""
    return blake2b(key.encode(), digest_size=_DIGEST_BYTES, person=b"epd-api-key").digest()
