"""The committed checkpoint: what it finds, and that its files are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration, Qwen3VLModel

from epd.demo.checkpoint_format import write_checkpoint
from epd.demo.embedding import Embedder
from epd.demo.evaluate import evaluate, table
from epd.demo.pictures import HELD_OUT, Pair, gallery
from epd.demo.retrieval import Retrieval
from epd.demo.training_model import TrainingModel
from epd.models.checkpoint import Checkpoint

MOST_BYTES = 4_000_000
FILES = {
    "README.md",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "merges.txt",
    "model.safetensors",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
}


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """The checkpoint that comes with the package."""
    return Checkpoint.open("demo")


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Four held-out renderings of every class."""
    return gallery(HELD_OUT, per_class=4)


def test_captions_find_their_pictures(checkpoint: Checkpoint, pairs: list[Pair]) -> None:
    """At least 95 % of captions rank a held-out picture of their class first; of pictures, their caption."""
    found = evaluate(checkpoint, pairs)
    assert (found.num_captions, found.num_pictures) == (48, 192)
    assert found.caption_to_picture >= 0.95, table(found)
    assert found.picture_to_caption >= 0.95, table(found)


def test_random_weights_find_nothing(pairs: list[Pair], tmp_path: Path) -> None:
    """The same evaluation is near chance on untrained weights: it is the training that it measures."""
    found = evaluate(Checkpoint.open(write_checkpoint(tmp_path)), pairs)
    assert found.caption_to_picture < 0.2, table(found)


def test_training_and_serving_embed_alike(checkpoint: Checkpoint, pairs: list[Pair]) -> None:
    """The forward that was trained and the one that serves give the same vectors."""
    some = pairs[::16]
    trained = TrainingModel(checkpoint).eval()
    with torch.no_grad():
        rows, grids = trained.encode([pair.picture for pair in some])
        vectors = trained.embed([pair.words for pair in some], rows, grids)
    served = Embedder(checkpoint)
    ours = torch.cat(
        [
            served.embed_pictures([pair.picture for pair in some]),
            served.embed_texts([pair.words for pair in some]),
        ]
    )
    assert torch.cosine_similarity(vectors, ours).min() >= 0.99999


def test_folder_is_small_and_holds_nothing_else(checkpoint: Checkpoint) -> None:
    """The folder has the files of a checkpoint, no optimizer state, and less than 4 MB."""
    files = list(checkpoint.folder.iterdir())
    assert {file.name for file in files} == FILES
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


def test_no_file_names_a_place_on_a_machine(checkpoint: Checkpoint) -> None:
    """No configuration and no weight file's header holds the path of a folder that it was made in."""
    for file in checkpoint.folder.glob("*config.json"):
        assert not re.findall(r'"/\w+|_name_or_path', file.read_text()), file.name
    with safe_open(checkpoint.folder / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}


@pytest.mark.parametrize("model_class", [Qwen3VLForConditionalGeneration, Qwen3VLModel])
def test_transformers_finds_every_weight(checkpoint: Checkpoint, model_class: type[Qwen3VLModel]) -> None:
    """transformers loads the folder without a missing or unexpected tensor."""
    model, report = model_class.from_pretrained(checkpoint.folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.config.model_type == "qwen3_vl"


def test_tokenizer_ends_with_end_of_text(checkpoint: Checkpoint) -> None:
    """The tokenizer appends `<|endoftext|>`, as that of Qwen3-VL-Embedding does; it is the token pooled."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a red circle").input_ids)[-1] == "<|endoftext|>"


def test_captions_are_few_tokens(checkpoint: Checkpoint) -> None:
    """The tokenizer knows the captions' words whole."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder)
    assert tokenizer.tokenize("a purple triangle") == ["a", "Ġpurple", "Ġtriangle"]


def test_measure_counts_first_hits_and_margins() -> None:
    """Two captions, two pictures each: one caption finds its class, the other does not."""
    captions = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    pictures = torch.tensor([[0.6, 0.0], [0.5, 0.1], [0.2, 0.3], [0.1, 0.05]])
    pictures[1] = torch.tensor([0.5, 0.9])
    found = Retrieval.measure(pictures, captions, per_class=2)
    assert found.caption_to_picture == 0.5
    assert found.picture_to_caption == 0.5
    assert found.smallest_margin == pytest.approx(0.05 - 0.9)


def test_measure_refuses_an_uneven_gallery() -> None:
    """A number of pictures that is not `per_class` for each caption raises ValueError."""
    with pytest.raises(ValueError, match="3 pictures are not 2 of each of 2 classes"):
        Retrieval.measure(torch.zeros(3, 4), torch.zeros(2, 4), per_class=2)
