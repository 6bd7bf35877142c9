"""Files to items: pictures as their bytes, everything else as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

PICTURES = {".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
TEXTS = {".md", ".rst", ".txt"}
Item = dict[str, Any]


def find_files(names: Iterable[str]) -> list[Path]:
    """Files named, and those in folders that are pictures or texts by their suffix, each once.

    Raises ValueError for a name that is not there, or when nothing is left.
    """
    paths = list(dict.fromkeys(path for name in names for path in _files(Path(name))))
    if not paths:
        raise ValueError("there is no picture and no text file there")
    return paths


def read_item(path: Path) -> Item:
    """`{"image": bytes}` or `{"text": str}`. Raises ValueError for what is neither, OSError as it comes."""
    data = path.read_bytes()
    if path.suffix.lower() in PICTURES:
        return {"image": data}
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        raise ValueError("neither a picture by its suffix nor text in UTF-8") from None


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from (
            each
            for each in sorted(path.rglob("*"))
            if each.suffix.lower() in PICTURES | TEXTS and each.is_file()
        )
    elif path.is_file():
        yield path
    else:
        raise ValueError(f"no such file: {path}")
