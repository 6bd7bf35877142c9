"""Copies of checkpoints with something changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def copy_with(source: Path, target: Path, texts: Mapping[str, str]) -> Path:
    """Copy the checkpoint `source` into `target`, with some files' texts replaced; returns `target`."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    for name, text in texts.items():
        (target / name).write_text(text, encoding="utf-8")
    return target


def copy_with_json(source: Path, target: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Copy the checkpoint `source` into `target`, one JSON file changed in place; returns `target`."""
    document = json.loads((source / name).read_text(encoding="utf-8"))
    change(document)
    return copy_with(source, target, {name: json.dumps(document)})


def copy_with_tensors(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy `source` into `target` with its weights changed in place and in one file; returns `target`."""
    copy_with(source, target, {})
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(target.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target
