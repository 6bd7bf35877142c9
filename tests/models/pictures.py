"""Small pictures for tests, as the bytes of a file."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth coloured pattern with noise, different on every side and for every seed."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(5, 30) + y / rng.uniform(5, 30) + rng.uniform(0, 6)) for _ in range(4)]
    values = 127 + 110 * np.stack(waves, axis=-1) + rng.normal(0, 8, (height, width, 4))
    image = Image.fromarray(values.clip(0, 255).astype(np.uint8), "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """The bytes of `image` as a file."""
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def png(width: int, height: int, seed: int = 0) -> bytes:
    """The bytes of a `picture` as PNG."""
    return encoded(picture(width, height, seed))
