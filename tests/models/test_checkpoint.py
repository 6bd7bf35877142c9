"""Finding checkpoints, and what they say about themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import epd
from epd.models.checkpoint import Checkpoint, demo_folder
from epd.models.errors import CheckpointError
from epd.models.families import family_of, resolve_dtype
from tests.models.edit import copy_with, copy_with_json, copy_with_tensors

VISION = "model.visual."


class FakeHub:
    """Stands in for snapshot_download: answers with `folder`, or raises `error`."""

    def __init__(self, folder: Path | None = None, error: Exception | None = None) -> None:
        self.folder, self.error = folder, error
        self.calls: list[tuple[str, str | None]] = []
        self.patterns: list[str] = []

    def __call__(self, name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.calls.append((name, revision))
        self.patterns = allow_patterns
        if self.error is not None:
            raise self.error
        return str(self.folder)


def test_a_local_folder(sharded_folder: Path) -> None:
    """A folder is opened where it lies, by text or by Path."""
    for name in (sharded_folder, str(sharded_folder)):
        checkpoint = Checkpoint.open(name)
        assert (checkpoint.folder, checkpoint.revision) == (sharded_folder, None)
        assert checkpoint.model_type == "qwen3_vl"
        assert checkpoint.config.text_config.hidden_size == 80


def test_the_alias_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`demo` is the checkpoint that comes with the package, even where a folder of that name lies."""
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint.open("demo")
    assert (checkpoint.name, checkpoint.folder) == ("demo", demo_folder())


def test_a_hub_id_goes_through_the_hub(sharded_folder: Path) -> None:
    """Name and revision are passed on, with the file patterns that a checkpoint needs; the commit is kept."""
    hub = FakeHub(sharded_folder)
    checkpoint = Checkpoint.open("org/model", revision="v1", download=hub)
    assert hub.calls == [("org/model", "v1")]
    assert hub.patterns == ["*.json", "*.txt", "*.safetensors", "*.jinja"]
    assert (checkpoint.name, checkpoint.revision) == ("org/model", sharded_folder.name)


def test_a_hub_that_fails_is_named() -> None:
    """The hub's error becomes a CheckpointError with the id and the revision."""
    hub = FakeHub(error=OSError("401"))
    with pytest.raises(CheckpointError, match=r"'org/model' at revision v1 .* 401"):
        Checkpoint.open("org/model", revision="v1", download=hub)


OFFLINE = """
import sys
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError
checkpoint = Checkpoint.open("org/cached", revision="main")
print(checkpoint.model_type, checkpoint.revision)
try:
    Checkpoint.open("org/absent")
except CheckpointError as error:
    print("refused", "org/absent" in str(error))
"""


def test_offline_mode_reads_the_cache_alone(sharded_folder: Path, tmp_path: Path) -> None:
    """With HF_HUB_OFFLINE a cached model opens, and one that is not cached is refused at once."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--cached"
    copy_with(sharded_folder, repository / "snapshots" / commit, {})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(epd.__file__).parents[1])
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [f"qwen3_vl {commit}", "refused True"], done.stderr


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "~/absent-folder", "a/b/c"])
def test_a_missing_folder_is_refused(name: str) -> None:
    """What looks like a path is not looked for on the hub."""
    hub = FakeHub(error=AssertionError("asked"))
    with pytest.raises(CheckpointError, match="no such folder"):
        Checkpoint.open(name, download=hub)


@pytest.mark.parametrize("config", [None, "{", "[]", "{}"])
def test_a_broken_configuration_is_refused(tmp_path: Path, config: str | None) -> None:
    """No config.json, no JSON, or no model_type in it."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="config"):
        Checkpoint.open(tmp_path)


def test_digest_is_of_the_weights_not_of_the_files(sharded_folder: Path, tmp_path: Path) -> None:
    """The same tensors in one file have the digest that they have in many."""
    single = copy_with_tensors(sharded_folder, tmp_path, lambda tensors: None)
    assert len(list(sharded_folder.glob("*.safetensors"))) > 2
    one, other = Checkpoint.open(sharded_folder), Checkpoint.open(single)
    assert one.weights_digest(VISION) == other.weights_digest(VISION)
    assert len(one.weights_digest(VISION)) == 64


def test_digest_covers_its_part_alone(sharded_folder: Path, tmp_path: Path) -> None:
    """One changed value changes the digest of its part, and of no other."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.visual.merger.norm.bias"][3] += 1

    changed = Checkpoint.open(copy_with_tensors(sharded_folder, tmp_path, change))
    original = Checkpoint.open(sharded_folder)
    assert changed.weights_digest(VISION) != original.weights_digest(VISION)
    language = "model.language_model."
    assert changed.weights_digest(language) == original.weights_digest(language)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({"model.visual.new": torch.zeros(1)}),
        lambda tensors: tensors.update({"model.visual.merger.norm.bias": torch.zeros(48, 1)}),
        lambda tensors: tensors.update({"model.visual.merger.norm.bias": torch.zeros(48).half()}),
    ],
    ids=["name", "shape", "dtype"],
)
def test_digest_covers_names_shapes_and_dtypes(sharded_folder: Path, tmp_path: Path, change: object) -> None:
    """Not the bytes alone."""
    assert callable(change)
    changed = Checkpoint.open(copy_with_tensors(sharded_folder, tmp_path, change))
    assert changed.weights_digest(VISION) != Checkpoint.open(sharded_folder).weights_digest(VISION)


def test_encoder_digest_covers_settings_too(sharded_folder: Path, tmp_path: Path) -> None:
    """Other deepstack layers over the same weights make other rows."""

    def change(config: dict[str, dict[str, object]]) -> None:
        config["vision_config"]["deepstack_visual_indexes"] = [0, 2, 5]

    changed = Checkpoint.open(copy_with_json(sharded_folder, tmp_path, "config.json", change))
    original = Checkpoint.open(sharded_folder)
    assert family_of(changed).encoder_digest(changed) != family_of(original).encoder_digest(original)
    assert family_of(original).encoder_digest(original) == family_of(original).encoder_digest(original)


def test_an_index_that_is_wrong_is_refused(sharded_folder: Path, tmp_path: Path) -> None:
    """Broken JSON, or a file that leads out of the folder."""
    name = "model.safetensors.index.json"
    broken = Checkpoint.open(copy_with(sharded_folder, tmp_path / "a", {name: "{}"}))
    with pytest.raises(CheckpointError, match="not an index"):
        broken.read_tensors("")
    outside = '{"weight_map": {"model.visual.x": "../x.safetensors"}}'
    with pytest.raises(CheckpointError, match="outside"):
        Checkpoint.open(copy_with(sharded_folder, tmp_path / "b", {name: outside})).read_tensors("")


def test_no_weights_at_all_are_refused(sharded_folder: Path, tmp_path: Path) -> None:
    """A folder without safetensors says what it lacks."""
    for path in copy_with(sharded_folder, tmp_path, {}).glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path).read_tensors("")


def test_a_file_cut_short_is_refused(sharded_folder: Path, tmp_path: Path) -> None:
    """By the reader and by the digest."""
    copy_with_tensors(sharded_folder, tmp_path, lambda tensors: None)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.read_tensors(VISION)
    with pytest.raises(CheckpointError, match="cut off"):
        checkpoint.weights_digest("")


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
        ("float16", "cpu", torch.float16),
        ("auto", "cpu", torch.float32),
        ("auto", "cuda:1", torch.bfloat16),
    ],
)
def test_dtype(sharded_folder: Path, tmp_path: Path, name: str, device: str, expected: torch.dtype) -> None:
    """auto is the checkpoint's own on CUDA and float32 on a CPU."""
    folder = copy_with_json(
        sharded_folder, tmp_path, "config.json", lambda config: config.update(dtype="bfloat16")
    )
    assert resolve_dtype(Checkpoint.open(folder), name, device) == expected


def test_dtype_of_a_silent_configuration(sharded_folder: Path, tmp_path: Path) -> None:
    """auto falls back on what the weights are stored in."""

    def silence(config: dict[str, dict[str, object]]) -> None:
        for part in (config, config["text_config"], config["vision_config"]):
            part.pop("dtype", None)

    folder = copy_with_json(sharded_folder, tmp_path / "a", "config.json", silence)
    stored = copy_with_tensors(
        folder, tmp_path / "b", lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()})
    )
    assert resolve_dtype(Checkpoint.open(stored), "auto", "cuda") == torch.float16


def test_an_unknown_dtype_is_refused(sharded_folder: Path) -> None:
    """The names that would do are listed."""
    with pytest.raises(ValueError, match="auto, float32, bfloat16, float16; got 'int8'"):
        resolve_dtype(Checkpoint.open(sharded_folder), "int8", "cpu")
