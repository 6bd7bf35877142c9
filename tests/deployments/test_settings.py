"""Settings are checked before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from epd.deployments.settings import Settings


def test_no_arguments_are_a_valid_application() -> None:
    """Every setting has a default, stated once."""
    assert Settings() == Settings.model_validate({})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"modle": {}}, ["modle"]),
        ({"model": {"pth": "x"}}, ["model.pth"]),
        ({"store": {"backend": "redis"}}, ["store.backend", "mooncake"]),
        ({"store": {"backend": "shared_memory"}}, ["shared_memory", "store.host_bytes", "0"]),
        ({"store": {"host_path": "rows"}}, ["store.host_path", "'rows'"]),
        ({"store": {"address": "nowhere"}}, ["store.address", "'nowhere'"]),
        ({"store": {"address": "h:9003", "metrics_port": 9003}}, ["9003", "store.metrics_port"]),
        ({"store": {"device": "mlx5_0"}}, ["mlx5_0", "tcp"]),
        ({"encoder": {"max_batch_tokens": 0}}, ["encoder.max_batch_tokens"]),
        (
            {"limits": {"max_tokens_per_item": 20, "max_tokens_per_request": 10}},
            ["20", "10", "max_tokens_per_item", "max_tokens_per_request"],
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(document: dict[str, Any], words: list[str]) -> None:
    """A refusal names the setting and the value, both of them where two disagree."""
    with pytest.raises(ValidationError) as raised:
        Settings.model_validate(document)
    assert all(word in str(raised.value) for word in words), str(raised.value)
