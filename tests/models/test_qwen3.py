"""Qwen3-Embedding, on random weights in its file format."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from epd.models.checkpoint import Checkpoint
from epd.models.errors import InvalidItem
from epd.models.families import family_of
from tests.models.edit import copy_with
from tests.models.pipeline import Pipeline
from tests.models.sentences import SENTENCES
from tests.oracle import assert_same


def write(folder: Path, tokenizer_of: Path, model_class: Any, **overrides: Any) -> Path:
    """A checkpoint of `model_class` with random weights and another checkpoint's tokenizer."""
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=False,
        **overrides,
    )
    torch.manual_seed(3)
    model = model_class(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder)
    return folder


@pytest.fixture(scope="module", params=["model.", "bare", "sliding"])
def folder(
    request: pytest.FixtureRequest, demo_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    target = tmp_path_factory.mktemp("qwen3")
    if request.param == "sliding":
        window = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
        return write(target, demo_folder, Qwen3Model, **window)
    return write(target, demo_folder, Qwen3ForCausalLM if request.param == "model." else Qwen3Model)


@cache
def plain_parts(folder: Path) -> tuple[Any, Any]:
    model = Qwen3Model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model, AutoTokenizer.from_pretrained(folder)


def plain(folder: Path, text: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Last token's hidden state by transformers, unit length."""
    model, tokenizer = plain_parts(folder)
    inputs = tokenizer(text, return_tensors="pt", split_special_tokens=True)
    with torch.inference_mode():
        last = model(**inputs, use_cache=False).last_hidden_state[0, -1].numpy()
    vector: np.ndarray[Any, np.dtype[np.float32]] = last / np.linalg.norm(last)
    return vector


def test_texts_in_one_batch(folder: Path) -> None:
    """Vectors equal the plain forward's: weights named `model.*` beside a head, bare, and with windows."""
    texts = SENTENCES[:12]
    vectors = Pipeline(folder).embed([{"parts": [text]} for text in texts])
    for text, vector in zip(texts, vectors, strict=True):
        assert_same(vector, plain(folder, text))


def test_prompt_with_an_instruction(folder: Path) -> None:
    """`Instruct: ...` and `Query:` before the text, tokenised as one string."""
    item = {"parts": ["how tall is it?"], "instruction": "Find the answer"}
    vector = Pipeline(folder).embed([item])[0]
    assert_same(vector, plain(folder, "Instruct: Find the answer\nQuery:how tall is it?"))


def test_facts(folder: Path) -> None:
    """Last-token pooling, causal, text only."""
    family = family_of(Checkpoint.open(folder))
    assert (family.pooling, family.causal, family.takes_images, family.hidden_size) == (
        "last",
        True,
        False,
        64,
    )


def test_an_instruction_is_not_cut(folder: Path) -> None:
    """Truncation takes the text, never the instruction."""
    prompt = Pipeline(folder).prompt
    empty = prompt.render(["x"], "Find it").num_tokens - 1
    full = prompt.render(["one two three"], "Find it")
    assert prompt.render(["one two three"], "Find it", max_tokens=empty + 1).num_tokens == empty + 1
    assert full.num_tokens > empty + 1
    with pytest.raises(InvalidItem, match="without its text"):
        prompt.render(["one two three"], "Find it", max_tokens=empty - 1)


def test_a_longest_input_of_the_sentence_files_counts(folder: Path, tmp_path: Path) -> None:
    """`max_seq_length` limits what the configuration allows."""
    limited = copy_with(folder, tmp_path, {"sentence_bert_config.json": '{"max_seq_length": 99}'})
    assert family_of(Checkpoint.open(limited)).max_tokens == 99
