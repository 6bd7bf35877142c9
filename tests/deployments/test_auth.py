"""API keys, where they come from, and what they keep apart."""

from __future__ import annotations

import contextlib
import hmac
from pathlib import Path

import pytest
from pydantic import ValidationError

from epd.deployments.auth import Caller, Gate, read_keys
from epd.deployments.errors import RateLimited, Unauthorized
from epd.deployments.settings import AuthSettings

KEYS = {"KEYS": "one,two  three\n"}


def gate(**settings: object) -> Gate:
    return Gate(AuthSettings(keys_env="KEYS", **settings), KEYS, clock=lambda: 0.0)


def test_without_keys_everyone_may_ask() -> None:
    """No source of keys: any header will do, and all share one cache."""
    open_gate = Gate(AuthSettings(), {})
    assert open_gate.admit(None) == open_gate.admit("Bearer x") == Caller(None)


@pytest.mark.parametrize("key", ["one", "two", "three"])
def test_each_key_is_taken(key: str) -> None:
    """Several keys are valid side by side; the scheme's case does not matter."""
    assert gate().admit(f"Bearer {key}") == gate().admit(f"bearer  {key} ")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer four", "Basic one", "one", "Bearer onetwo"]
)
def test_other_headers_are_refused(header: str | None) -> None:
    """A missing, malformed or unknown key is refused, for requests and for what only identifies."""
    with pytest.raises(Unauthorized) as raised:
        gate().admit(header)
    with pytest.raises(Unauthorized):
        gate().identify(header)
    assert "one" not in str(raised.value)


@pytest.mark.parametrize("header", ["Bearer one", "Bearer three", "Bearer four", "Bearer " + "x" * 5000])
def test_a_key_is_compared_with_all_in_constant_time(header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever key is right, or none: as many comparisons, of values of one length, by hmac's own."""
    compared: list[int] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.extend((len(one), len(other)))
        return one == other

    opened = gate()
    monkeypatch.setattr(hmac, "compare_digest", compare)
    with contextlib.suppress(Unauthorized):
        opened.admit(header)
    assert (len(compared), len(set(compared))) == (2 * 3, 1)


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    """One key a line; blank lines and comments do not count; file and environment add up."""
    file = tmp_path / "keys"
    file.write_text("# team a\n alpha \n\nbeta\nalpha\n")
    settings = AuthSettings(keys_file=str(file), keys_env="KEYS")
    assert read_keys(settings, KEYS) == ["alpha", "beta", "one", "two", "three"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "No such file"), ("# none\n", "holds no key"), ("a b\n", "without blanks"), ("é\n", "ASCII")],
)
def test_a_file_without_keys_is_refused_at_start(tmp_path: Path, content: str | None, words: str) -> None:
    """A gate that was asked for keys and has none does not open; the message names the setting."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=words):
        Gate(AuthSettings(keys_file=str(file)), {})


def test_an_empty_environment_is_refused_at_start() -> None:
    """An unset variable is not taken for no authentication."""
    with pytest.raises(ValueError, match=r"auth\.keys_env names KEYS, which holds no key"):
        Gate(AuthSettings(keys_env="KEYS"), {})


@pytest.mark.parametrize("settings", [{"isolate_cache": True}, {"requests_per_minute": 5}])
def test_what_needs_keys_is_refused_without(settings: dict[str, object]) -> None:
    """Isolation and rate limits are by key: without keys they would do nothing."""
    with pytest.raises(ValidationError, match=r"neither auth\.keys_file nor auth\.keys_env"):
        AuthSettings.model_validate(settings)


def test_each_key_has_its_own_rate() -> None:
    """One key's requests do not use up another's; identifying costs nothing."""
    limited = gate(requests_per_minute=60, burst=1)
    limited.identify("Bearer one")
    limited.admit("Bearer one")
    with pytest.raises(RateLimited):
        limited.admit("Bearer one")
    limited.admit("Bearer two")


def test_callers_share_cached_pictures_unless_told_not_to() -> None:
    """By default the request's own salt decides alone."""
    caller = gate().admit("Bearer one")
    assert (caller.salt(None), caller.salt("s")) == (None, "s")


def test_isolated_callers_never_reach_the_same_salt() -> None:
    """With isolation each key has its salts to itself, also when a caller copies another's."""
    isolated = gate(isolate_cache=True)
    one, two = isolated.admit("Bearer one"), isolated.admit("Bearer two")
    salts = [
        caller.salt(salt) for caller in (one, two) for salt in (None, "", "s", one.salt(None), two.salt("s"))
    ]
    assert None not in salts
    assert len(set(salts)) == len(salts)
    assert one.salt("s") == isolated.admit("Bearer one").salt("s")
    assert "one" not in str(one)
