"""openai-node, as it is. `npm install --prefix tests/clients` brings it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients.conftest import Service, same

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        shutil.which("node") is None or not (HERE / "node_modules" / "openai").is_dir(),
        reason="needs node, and `npm install --prefix tests/clients`",
    ),
]


def embed(service: Service, value: Any, **options: Any) -> Any:
    """What the script prints."""
    arguments = [f"{service.url}/v1", service.model, json.dumps(value), json.dumps(options)]
    done = subprocess.run(
        ["node", str(HERE / "embed.mjs"), *arguments], check=True, capture_output=True, timeout=120
    )
    return json.loads(done.stdout)


def test_texts(service: Service) -> None:
    """Texts give the vectors that plain HTTP gives (the client asks for base64 by itself)."""
    answer = embed(service, ["a red circle", "two squares"])
    expected = service.vectors({"input": ["a red circle", "two squares"]})
    assert same(np.array(answer["vectors"], np.float32), expected)
    assert answer["usage"]["prompt_tokens"] > 0


def test_dimensions_floats_and_token_ids(service: Service) -> None:
    """The options of OpenAI's own API."""
    answer = embed(service, [[5, 6]], dimensions=4, encoding_format="float")
    expected = service.vectors({"input": [[5, 6]], "dimensions": 4})
    assert same(np.array(answer["vectors"], np.float32), expected)


def test_errors(service: Service) -> None:
    """A refusal reaches the caller as BadRequestError with our param."""
    assert embed(service, [""]) == {"name": "BadRequestError", "status": 400, "param": "input[0]"}
