"""Checkpoints: where they lie, and what they say about themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import epd
from epd.models.errors import CheckpointError
from epd.models.weights import WeightFiles

DEMO = "demo"
_WANTED_FILES = ("*.json", "*.txt", "*.safetensors", "*.jinja")


class Checkpoint:
    """A folder in the Hugging Face file format. Nothing but `config.json` is read until it is needed."""

    def __init__(self, folder: Path, name: str | None = None, revision: str | None = None) -> None:
        """`name`: what the caller called it. `revision`: the commit, for one that came from a hub.

        Raises CheckpointError when there is no readable `config.json` that names a model type.
        """
        self.folder = folder
        self.name = str(folder) if name is None else name
        self.revision = revision
        settings = _read_json(folder / "config.json")
        if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
            raise CheckpointError(f"{folder / 'config.json'} names no model_type")
        self.settings: dict[str, Any] = settings  # config.json as it is
        self.model_type: str = settings["model_type"]

    @classmethod
    def open(
        cls,
        path_or_id: str | Path,
        revision: str | None = None,
        *,
        download: Callable[..., str] | None = None,
    ) -> Checkpoint:
        """The checkpoint called `path_or_id`: `"demo"`, a local folder, or a hub id such as `"org/model"`.

        A hub id goes through `huggingface_hub.snapshot_download`, which heeds its cache, its token and
        `HF_HUB_OFFLINE`; `revision` picks a branch, tag or commit. `download` replaces that function.
        Raises CheckpointError when it is not there.
        """
        name = str(path_or_id)
        if name == DEMO:
            return cls(demo_folder(), DEMO)
        folder = Path(name).expanduser()
        if folder.is_dir():
            return cls(folder, name)
        if isinstance(path_or_id, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise CheckpointError(f"no such folder: {name}")
        return cls._from_hub(name, revision, download)

    @classmethod
    def _from_hub(cls, name: str, revision: str | None, download: Callable[..., str] | None) -> Checkpoint:
        from huggingface_hub import snapshot_download

        fetch = snapshot_download if download is None else download
        at = f" at revision {revision}" if revision else ""
        try:
            folder = Path(fetch(name, revision=revision, allow_patterns=list(_WANTED_FILES)))
        except (OSError, ValueError) as error:  # what the hub's own errors derive from
            raise CheckpointError(
                f"{name!r}{at} is neither {DEMO!r}, a folder, nor a model that the hub or its local cache "
                f"has: {error}"
            ) from error
        return cls(folder, name, folder.name)

    @cached_property
    def config(self) -> Any:
        """transformers' configuration. Raises CheckpointError when transformers refuses it."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {self.folder / 'config.json'}: {error}") from error

    @cached_property
    def weights(self) -> WeightFiles:
        """Its tensors. Raises CheckpointError when there are none."""
        return WeightFiles(self.folder)

    def read_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """See `WeightFiles.read`."""
        return self.weights.read(prefix)

    def weights_digest(self, prefix: str) -> str:
        """See `WeightFiles.digest`."""
        return self.weights.digest(prefix)

    def read_json(self, name: str) -> Any | None:
        """One of its JSON files, or None when it has no such file. Raises CheckpointError when broken."""
        path = self.folder / name
        return _read_json(path) if path.is_file() else None


def demo_folder() -> Path:
    """Folder of the checkpoint that comes with the package."""
    return Path(epd.__file__).parent / "demo" / "checkpoint"


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
