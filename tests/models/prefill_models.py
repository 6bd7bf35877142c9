"""Small random language models, and sequences for them."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertModel,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLTextConfig,
    Qwen3VLTextModel,
)

from epd.cache.kv.settings import KVSettings
from epd.cache.types import MediaGrid
from epd.kernels.attention.base import Backend
from epd.kernels.attention.grouped import GroupedSDPA
from epd.models.attention import IMPLEMENTATION
from epd.models.bert import BertLanguageModel
from epd.models.pieces import PrefillSequence
from epd.models.positions import mrope_positions
from epd.models.prefill import PrefillRunner, build_runner
from epd.models.qwen3 import Qwen3LanguageModel
from epd.models.qwen3_vl import Qwen3VLLanguageModel
from epd.models.types import MediaSpan, TokenSequence

VOCABULARY = 200
IMAGE = 199
HIDDEN = 64
MERGE = 2
ROW_DIM = HIDDEN * 3  # a merged feature and two deepstack features

QWEN3_CONFIG: dict[str, Any] = {"model_type": "qwen3", "num_attention_heads": 4}
BERT_CONFIG: dict[str, Any] = {"model_type": "bert", "num_attention_heads": 4}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}


class FakeWindowlessBackend(GroupedSDPA):
    """Builds no sliding window, as torch's varlen attention in 2.10."""

    builds_window = False


def qwen3_vl(dtype: torch.dtype = torch.float32) -> Qwen3VLLanguageModel:
    """Causal, grouped queries, M-RoPE, deepstack behind two of its layers."""
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    config = Qwen3VLTextConfig(**_SIZES, **_GROUPED, rope_parameters=rope)
    return Qwen3VLLanguageModel(_random(Qwen3VLTextModel, config, dtype))


def qwen3(dtype: torch.dtype = torch.float32, **overrides: Any) -> Qwen3LanguageModel:
    """Causal, text alone."""
    return Qwen3LanguageModel(_random(Qwen3Model, qwen3_config(**overrides), dtype))


def qwen3_config(**overrides: Any) -> Any:
    """Of `qwen3`."""
    return Qwen3Config(**{**_SIZES, **_GROUPED, **overrides})


def qwen3_06b(dtype: torch.dtype, device: str = "cpu") -> Qwen3LanguageModel:
    """Qwen3-Embedding-0.6B in every size but its vocabulary. All 28 layers share the random weights of
    one, which keeps it small; keys and values still differ from layer to layer.
    """
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    config.num_hidden_layers = 1
    model = _random(Qwen3Model, config, dtype)
    first = model.layers[0]
    for index in range(1, 28):
        layer = deepcopy(first, {id(weight): weight for weight in first.parameters()})
        layer.self_attn.layer_idx = index
        model.layers.append(layer)
    config.num_hidden_layers = 28
    return Qwen3LanguageModel(model.to(device))


def bert() -> BertLanguageModel:
    """Bidirectional."""
    return BertLanguageModel(_random(BertModel, BertConfig(**_SIZES), torch.float32, add_pooling_layer=False))


def _random(kind: Any, config: Any, dtype: torch.dtype, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype, **options).eval()


def text(
    num_tokens: int, seed: int = 0, start: Sequence[int] = (), salt: str | None = None
) -> PrefillSequence:
    """Random token ids after `start`, `num_tokens` in all."""
    fresh = np.random.default_rng(seed).integers(0, IMAGE, num_tokens)
    ids = np.concatenate([np.asarray(start, dtype=np.int64), fresh])[:num_tokens]
    return _sequence(TokenSequence(ids), (), salt)


def with_pictures(
    before: int, grids: Sequence[MediaGrid], keys: Sequence[str], seed: int = 0
) -> PrefillSequence:
    """`before` text tokens, then the pictures with three text tokens behind each."""
    random = np.random.default_rng(seed)
    ids, spans = [*random.integers(0, IMAGE, before)], []
    for grid in grids:
        spans.append(MediaSpan(len(ids), grid.num_tokens(MERGE), grid))
        ids += [IMAGE] * grid.num_tokens(MERGE) + [*random.integers(0, IMAGE, 3)]
    return _sequence(TokenSequence(np.asarray(ids, dtype=np.int64), tuple(spans)), tuple(keys), None)


def _sequence(tokens: TokenSequence, keys: tuple[str, ...], salt: str | None) -> PrefillSequence:
    return PrefillSequence(tokens, mrope_positions(tokens, MERGE), keys, salt)


def rows_for(sequences: Sequence[PrefillSequence], dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
    """Random media rows, the same for the same key."""
    rows = [
        torch.randn(span.length, ROW_DIM, generator=torch.Generator().manual_seed(sum(key.encode())))
        for sequence in sequences
        for span, key in zip(sequence.tokens.spans, sequence.media_keys, strict=True)
    ]
    return torch.cat(rows).to(dtype) if rows else None


def kv_settings(**values: Any) -> KVSettings:
    """Settings with small pages."""
    return KVSettings.model_validate({"page_size": 4, "max_total_tokens": 512, **values})


def runner(
    model: Any,
    environ: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    backend: Backend | None = None,
    **settings: Any,
) -> PrefillRunner:
    """A runner over `model` with small pages, as `build_runner` makes it."""
    config = config or (QWEN3_CONFIG if model.causal else BERT_CONFIG)
    return build_runner(model, kv_settings(**settings), config, environ or {}, backend)
