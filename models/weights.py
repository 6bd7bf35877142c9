"""Weights on disk: safetensors, one file or many, of which only the needed files are opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from epd.models.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_READ_BYTES = 16 * 2**20


class WeightFiles:
    """Which file of a checkpoint holds which tensor."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError when `folder` holds no safetensors weights or a broken index."""
        self._folder = folder
        self._file_of = _read_index(folder)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the checkpoint."""
        return frozenset(self._file_of)

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors whose name starts with `prefix`, on the CPU, in their stored dtype, under their full names.

        Raises CheckpointError when there is none, or when a file does not hold what the index says.
        """
        tensors: dict[str, torch.Tensor] = {}
        for file, names in self._by_file(prefix).items():
            try:
                with safe_open(self._folder / file, framework="pt") as weights:
                    for name in names:
                        tensors[name] = weights.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"cannot read {self._folder / file}: {error}") from error
        return tensors

    def dtype(self, prefix: str) -> torch.dtype:
        """Dtype of the first floating-point tensor under `prefix`, read from a file's header."""
        for file, names in self._by_file(prefix).items():
            header, _ = _read_header(self._folder / file)
            for name in names:
                if (dtype := _DTYPES.get(str(header[name]["dtype"]))) is not None:
                    return dtype
        raise CheckpointError(f"{self._folder} holds no floating-point tensor named {prefix}*")

    def digest(self, prefix: str) -> str:
        """256-bit hash in hex of the names, dtypes, shapes and bytes of the tensors under `prefix`.

        The same weights give the same digest however they are spread over files.
        """
        place: dict[str, str] = {}
        for file, names in self._by_file(prefix).items():
            place |= dict.fromkeys(names, file)
        headers = {file: _read_header(self._folder / file) for file in set(place.values())}
        digest = blake2b(digest_size=32)
        for name in sorted(place):
            header, data_start = headers[place[name]]
            if name not in header:
                raise CheckpointError(
                    f"{self._folder / place[name]} lacks {name}, which the index says it holds"
                )
            entry = header[name]
            begin, end = entry["data_offsets"]
            label = json.dumps([name, entry["dtype"], entry["shape"], end - begin]).encode()
            digest.update(len(label).to_bytes(8, "little") + label)
            for block in _read_blocks(self._folder / place[name], data_start + begin, end - begin):
                digest.update(block)
        return digest.hexdigest()

    def _by_file(self, prefix: str) -> dict[str, list[str]]:
        files: dict[str, list[str]] = {}
        for name in sorted(self._file_of):
            if name.startswith(prefix):
                files.setdefault(self._file_of[name], []).append(name)
        if not files:
            raise CheckpointError(f"{self._folder} holds no tensor named {prefix}*")
        return files


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def _read_index(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is not an index of safetensors files") from error
        if outside := sorted(file for file in set(files.values()) if Path(file).name != file):
            raise CheckpointError(f"{index} names files outside its folder: {outside}")
        return files
    single = folder / SINGLE_FILE
    if not single.is_file():
        raise CheckpointError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    header, _ = _read_header(single)
    return dict.fromkeys(header, SINGLE_FILE)


def _read_header(path: Path) -> tuple[dict[str, dict[str, list[int]]], int]:
    """Header of a safetensors file, without its metadata, and where the tensors' bytes start.

    Format: 8 bytes of little-endian length, that much JSON, then the bytes
    (https://github.com/huggingface/safetensors#format).
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file")
            header = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file")
    header.pop("__metadata__", None)
    return header, 8 + length


def _read_blocks(path: Path, start: int, length: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        while length:
            block = file.read(min(length, _READ_BYTES))
            if not block:
                raise CheckpointError(f"{path} is cut off")
            length -= len(block)
            yield block
