"""What a model's config.json says about its keys and values, without loading the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class KVKind(StrEnum):
    """How a model keeps what later tokens read."""

    MULTI_HEAD = "multi-head attention"
    LATENT = "multi-head latent attention (MLA)"
    SPARSE = "sparse attention"
    SLIDING_WINDOW = "sliding-window attention"
    RECURRENT = "a Mamba or linear-attention hybrid"
    UNKNOWN = "an unknown kind of attention"


@dataclass(frozen=True, slots=True)
class ModelKV:
    """kind, with the config entry that gave it away; generation and bidirectional likewise, or None."""

    kind: KVKind
    evidence: str
    generation: str | None
    bidirectional: str | None


# Entries that only such models have, as their config.json files on the Hugging Face hub spell them.
_SPARSE = ("index_topk", "index_n_heads", "sparse_config", "sparse_attention_config", "block_sparse_config")
_LATENT = ("kv_lora_rank",)
_RECURRENT = (
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "hybrid_override_pattern",
    "linear_num_key_heads",
    "linear_attn_config",
    "attn_type_list",
    "lru_width",
    "conv_L_cache",
)
_RECURRENT_TYPES = ("mamba", "rwkv", "xlstm", "retnet", "jamba", "bamba", "zamba", "recurrent_gemma")
_WINDOW = ("attention_window", "attention_chunk_size")
_BERT_LIKE = ("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert")
_BIDIRECTIONAL_TYPES = (*_BERT_LIKE, "mpnet", "nomic_bert", "roberta", "xlm-roberta")
_HEADS = ("num_attention_heads", "n_heads", "n_head")


def describe_kv(config: Mapping[str, Any]) -> ModelKV:
    """Read a parsed config.json, the part that concerns the language model of a multimodal one."""
    text = _text_part(config)
    kind, evidence = _kind(text)
    return ModelKV(kind, evidence, _generation(config) or _generation(text), _bidirectional(text))


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("thinker_config", "text_config", "language_config", "llm_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return _text_part(inner)
    return config


def _kind(text: Mapping[str, Any]) -> tuple[KVKind, str]:
    def first(names: tuple[str, ...]) -> str | None:
        return next((f"{name}={text[name]!r}" for name in names if text.get(name) is not None), None)

    model_type = str(text.get("model_type", ""))
    if text.get("attention_type") == "block_sparse":
        return KVKind.SPARSE, "attention_type='block_sparse'"
    for kind, names in ((KVKind.SPARSE, _SPARSE), (KVKind.RECURRENT, _RECURRENT), (KVKind.LATENT, _LATENT)):
        if found := first(names):
            return kind, found
    if any(name in model_type for name in _RECURRENT_TYPES):
        return KVKind.RECURRENT, f"model_type={model_type!r}"
    layer_types = frozenset(text.get("layer_types") or ())
    if odd := layer_types - {"full_attention", "attention", "sliding_attention", "chunked_attention"}:
        return KVKind.RECURRENT, f"layer_types with {sorted(odd)}"
    if windowed := layer_types - {"full_attention", "attention"}:
        return KVKind.SLIDING_WINDOW, f"layer_types with {sorted(windowed)}"
    if found := first(_WINDOW):
        return KVKind.SLIDING_WINDOW, found
    if not layer_types and text.get("sliding_window") and text.get("use_sliding_window") is not False:
        return KVKind.SLIDING_WINDOW, f"sliding_window={text['sliding_window']!r}"
    if not layer_types and text.get("local_attention") and text.get("global_attn_every_n_layers", 1) > 1:
        return KVKind.SLIDING_WINDOW, f"local_attention={text['local_attention']!r}"
    if found := first(_HEADS):
        return KVKind.MULTI_HEAD, found
    return KVKind.UNKNOWN, f"model_type={model_type!r} without num_attention_heads"


def _generation(config: Mapping[str, Any]) -> str | None:
    """Encoder-decoders and decoders with cross-attention exist to generate."""
    if layers := config.get("cross_attention_layers"):
        return f"cross_attention_layers={layers!r}"
    names = ("is_encoder_decoder", "add_cross_attention", "is_decoder")
    return next((f"{name}=True" for name in names if config.get(name) is True), None)


def _bidirectional(text: Mapping[str, Any]) -> str | None:
    if text.get("use_bidirectional_attention") is True:
        return "use_bidirectional_attention=True"
    if text.get("is_causal") is False:
        return "is_causal=False"
    if text.get("model_type") in _BIDIRECTIONAL_TYPES and text.get("is_decoder") is not True:
        return f"model_type={text['model_type']!r}"
    return None
