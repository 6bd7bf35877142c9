"""Keys: equal exactly when everything that decides the rows is equal."""

from __future__ import annotations

import pytest
import torch

from epd.cache.keys import media_key, namespace
from epd.cache.types import MediaKey

FIELDS = {"model": "m", "weights": "w", "dtype": torch.float32, "preprocessing": "p"}


def test_equal_bytes_have_equal_keys() -> None:
    """Any bytes-like object of the same bytes names the same rows."""
    keys = {media_key("n", data) for data in (b"abc", bytearray(b"abc"), memoryview(b"abc"))}
    assert len(keys) == 1
    assert len(keys.pop().digest) == 64


def test_each_part_of_a_key_tells_rows_apart() -> None:
    """Bytes, modality, salt and namespace each make another key; no salt and an empty one differ."""
    keys = [
        media_key("n", b"abc"),
        media_key("n", b"abd"),
        media_key("n", b"abc", modality="video"),
        media_key("n", b"abc", salt=""),
        media_key("n", b"abc", salt="s"),
        media_key("n", b"abc", preprocessing="p"),
        media_key("o", b"abc"),
    ]
    assert len(set(keys)) == len(keys)


def test_fields_cannot_run_into_each_other() -> None:
    """What moves from one field to the next makes another key: each is behind its length."""
    assert media_key("n", b"bc", modality="imagea") != media_key("n", b"abc", modality="image")
    assert media_key("n", b"bc", salt="a") != media_key("n", b"c", salt="ab")
    moved = {**FIELDS, "model": "mw", "weights": ""}
    assert namespace(**moved) != namespace(**FIELDS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "x"), ("weights", "x"), ("dtype", torch.bfloat16), ("preprocessing", "x")],
)
def test_each_setting_that_decides_rows_makes_another_namespace(field: str, value: object) -> None:
    """Model, revision, dtype and preprocessing never share rows with others."""
    assert namespace(**{**FIELDS, field: value}) != namespace(**FIELDS)  # type: ignore[arg-type]


def test_keys_survive_restarts() -> None:
    """Digests are a format: stored rows would be lost if they changed. Fixed values, computed once."""
    assert str(media_key("n", b"abc")) == (
        "n/1c0f2aeca1059b368791883fc11e629da865a50422c673d8437e356ef21d0f92"
    )
    assert namespace(**FIELDS) == "42c93ccafcdd34bc41e1377e37aa847a"  # type: ignore[arg-type]


def test_parse_is_the_inverse_of_str() -> None:
    """A key comes back from its text; other text is refused."""
    key = media_key(namespace(**FIELDS), b"abc")  # type: ignore[arg-type]
    assert MediaKey.parse(str(key)) == key
    with pytest.raises(ValueError, match="not a media key"):
        MediaKey.parse("no slash")
