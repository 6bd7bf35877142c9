"""Items of every kind, asked for in one request."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.cluster.server import Server
from tests.models.pictures import png

Vectors = npt.NDArray[np.float32]


def cases(photo: bytes, seed: int) -> list[dict[str, Any]]:
    """Items of every kind; pictures of different seeds share nothing."""
    return [
        {"parts": ["a red circle on a dark background"]},
        {"parts": [png(100 + seed, 80, seed)]},
        {"parts": [png(150, 90, seed + 1), png(64, 200, seed + 2)]},
        {"parts": ["before\n", png(120, 120, seed + 3), "\nand after"]},
        {"parts": [png(150, 90, seed + 1), "the first picture of another item"]},
        {"parts": ["blue star"], "instruction": "Find the picture that matches"},
    ]


def as_json(item: dict[str, Any]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(part).decode()}"}}
        for part in item["parts"]
    ]
    return {"content": content, "instruction": item.get("instruction")}


def embed(server: Server, items: Sequence[dict[str, Any]]) -> Vectors:
    answer = server.post({"input": [as_json(item) for item in items], "encoding_format": "base64"})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])
