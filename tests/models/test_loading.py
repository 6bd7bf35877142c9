"""Loading one part of a checkpoint: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError
from epd.models.families import family_of
from tests.models.edit import copy_with, copy_with_tensors

VISION, LANGUAGE = "model.visual.", "model.language_model."


def load(folder: Path, part: str) -> object:
    checkpoint = Checkpoint.open(folder)
    family = family_of(checkpoint)
    loader = family.load_encoder if part == VISION else family.load_embedder
    return loader(checkpoint, torch.float32, "cpu")


@pytest.mark.parametrize(("part", "other"), [(VISION, LANGUAGE), (LANGUAGE, VISION)])
def test_only_the_files_of_the_part_are_opened(
    sharded_folder: Path, tmp_path: Path, part: str, other: str
) -> None:
    """Files that hold nothing of the part may be missing, and those of the part may not."""
    copy_with(sharded_folder, tmp_path, {})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith(part)}
    foreign = set(index.values()) - needed
    assert foreign
    for file in foreign:
        (tmp_path / file).unlink()
    load(tmp_path, part)
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        load(tmp_path, other)


def test_each_part_holds_its_own_weights_alone(sharded: Checkpoint) -> None:
    """Together they are the checkpoint's weights, once each."""
    names = sharded.weights.names
    vision, language = sharded.read_tensors(VISION), sharded.read_tensors(LANGUAGE)
    assert vision.keys() | language.keys() == names
    assert not vision.keys() & language.keys()


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (VISION, "model.visual.deepstack_merger_list.1.norm.weight"),
        (LANGUAGE, "model.language_model.norm.weight"),
    ],
)
def test_missing_weights_are_named(sharded_folder: Path, tmp_path: Path, part: str, name: str) -> None:
    """A weight that the model has and the checkpoint has not; the other part still loads."""
    copy_with_tensors(sharded_folder, tmp_path, lambda tensors: tensors.__delitem__(name))
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        load(tmp_path, part)
    load(tmp_path, LANGUAGE if part == VISION else VISION)


def test_unexpected_weights_are_named(sharded_folder: Path, tmp_path: Path) -> None:
    """A weight that the checkpoint has and the model has not."""
    name = "model.visual.blocks.9.norm1.bias"
    copy_with_tensors(sharded_folder, tmp_path, lambda tensors: tensors.update({name: torch.zeros(48)}))
    with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
        load(tmp_path, VISION)


def test_weights_of_another_shape_are_named(sharded_folder: Path, tmp_path: Path) -> None:
    """With both shapes."""
    name = "model.visual.merger.norm.bias"
    copy_with_tensors(sharded_folder, tmp_path, lambda tensors: tensors.update({name: torch.zeros(7)}))
    with pytest.raises(CheckpointError, match=rf"of another shape: {name} \[7\] not \[48\]"):
        load(tmp_path, VISION)


def test_many_missing_weights_are_counted(sharded_folder: Path, tmp_path: Path) -> None:
    """Ten names, then a number."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "blocks.1." in name]:
            tensors.pop(name)

    copy_with_tensors(sharded_folder, tmp_path, change)
    with pytest.raises(CheckpointError, match=r"missing: model\.visual\.blocks\.1.* and 2 more"):
        load(tmp_path, VISION)


def test_a_part_that_is_not_there_is_refused(sharded_folder: Path, tmp_path: Path) -> None:
    """A checkpoint without vision weights has no encoder, but an embedder."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(VISION)]:
            tensors.pop(name)

    copy_with_tensors(sharded_folder, tmp_path, change)
    with pytest.raises(CheckpointError, match=r"no tensor named model\.visual\.\*"):
        load(tmp_path, VISION)
    load(tmp_path, LANGUAGE)
