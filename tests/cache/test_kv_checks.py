"""Which settings start: legal ones pass unchanged, each illegal one is named with its value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig

from epd.cache.kv.checks import KVSettingsError, check_kv, storage_dtype
from epd.cache.kv.families import KVKind, describe_kv
from epd.cache.kv.settings import KVSettings

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN3_VL = {"model_type": "qwen3_vl", "text_config": {**QWEN3, "model_type": "qwen3_vl_text"}}
BERT = {"model_type": "bert", "num_attention_heads": 12, "is_decoder": False}
T5 = {"model_type": "t5", "num_heads": 8, "num_attention_heads": 8, "is_encoder_decoder": True}
MISTRAL = {"model_type": "mistral", "num_attention_heads": 32, "sliding_window": 4096}
DEEPSEEK = {"model_type": "deepseek_v3", "num_attention_heads": 128, "kv_lora_rank": 512}

NOT_PLAIN: list[tuple[dict[str, Any], KVKind, str]] = [
    (DEEPSEEK, KVKind.LATENT, "kv_lora_rank=512"),
    ({**DEEPSEEK, "model_type": "deepseek_v32", "index_topk": 2048}, KVKind.SPARSE, "index_topk=2048"),
    (
        {"model_type": "big_bird", "num_attention_heads": 12, "attention_type": "block_sparse"},
        KVKind.SPARSE,
        "block_sparse",
    ),
    (
        {"model_type": "minicpm", "num_attention_heads": 16, "sparse_config": {"topk": 64}},
        KVKind.SPARSE,
        "sparse_config",
    ),
    (MISTRAL, KVKind.SLIDING_WINDOW, "sliding_window=4096"),
    (
        {**QWEN3, "sliding_window": 4096, "use_sliding_window": True},
        KVKind.SLIDING_WINDOW,
        "sliding_window=4096",
    ),
    (
        {
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        KVKind.SLIDING_WINDOW,
        "sliding_attention",
    ),
    (
        {
            "model_type": "modernbert",
            "num_attention_heads": 12,
            "local_attention": 128,
            "global_attn_every_n_layers": 3,
        },
        KVKind.SLIDING_WINDOW,
        "local_attention=128",
    ),
    (
        {"model_type": "llama4_text", "num_attention_heads": 40, "attention_chunk_size": 8192},
        KVKind.SLIDING_WINDOW,
        "8192",
    ),
    ({"model_type": "mamba2", "num_heads": 64, "state_size": 128}, KVKind.RECURRENT, "state_size=128"),
    (
        {"model_type": "jamba", "num_attention_heads": 32, "mamba_d_state": 16},
        KVKind.RECURRENT,
        "mamba_d_state=16",
    ),
    (
        {
            "model_type": "qwen3_next",
            "num_attention_heads": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
        KVKind.RECURRENT,
        "linear_attention",
    ),
    (
        {"model_type": "nemotron_h", "num_attention_heads": 32, "hybrid_override_pattern": "M-M*"},
        KVKind.RECURRENT,
        "M-M",
    ),
    ({"model_type": "rwkv", "attention_hidden_size": 512}, KVKind.RECURRENT, "rwkv"),
    ({"model_type": "perceptron"}, KVKind.UNKNOWN, "perceptron"),
]
NAMES = [f"{config['model_type']}-{kind.name.lower()}" for config, kind, _ in NOT_PLAIN]

LEGAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, QWEN3),
    ({}, QWEN3_VL),
    ({}, BERT),
    ({"skip_kv": "on", "page_size": 1, "max_total_tokens": 1}, QWEN3_VL),
    ({"kv_cache": "paged"}, QWEN3),
    ({"kv_cache": "paged", "skip_kv": "off"}, BERT),
    ({"kv_cache": "paged", "skip_kv": "on", "prefill_chunk_tokens": 512}, QWEN3_VL),
    ({"kv_cache": "paged", "prefix_cache": True, "prefill_chunk_tokens": 512}, QWEN3_VL),
    ({"kv_cache": "paged", "kv_cache_dtype": "float8_e4m3fn"}, QWEN3),
    ({"kv_cache": "paged", "kv_cache_dtype": "float8_e4m3fn", "prefix_cache": True, "skip_kv": "off"}, QWEN3),
    ({"kv_cache": "paged"}, MISTRAL),
    ({"kv_cache": "paged"}, {**BERT, "is_decoder": True}),
]

ILLEGAL: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"skip_kv": "off"}, QWEN3, "skip_kv=off"),
    ({"prefill_chunk_tokens": 512}, QWEN3, "prefill_chunk_tokens=512"),
    ({"prefix_cache": True}, QWEN3, "prefix_cache=true"),
    ({"context_parallel": True}, QWEN3, "context_parallel=true"),
    ({"context_parallel_size": 2}, QWEN3, "context_parallel_size=2"),
    ({"kv_cache_dtype": "fp4_e2m1"}, QWEN3, "kv_cache_dtype=fp4_e2m1"),
    ({"kv_cache_dtype": "float4_e2m1fn_x2"}, QWEN3, "kv_cache_dtype=float4_e2m1fn_x2: fp4"),
    ({"kv_cache_dtype": "float8_e4m3fn"}, QWEN3, "kv_cache_dtype=float8_e4m3fn"),
    ({"kv_cache_dtype": "int8"}, QWEN3, "kv_cache_dtype=int8: it must be one of auto, float8_e4m3fn"),
    ({"hierarchical_kv": True}, QWEN3, "hierarchical_kv=true"),
    ({"sparse_kv": True}, QWEN3, "sparse_kv=true"),
    ({}, T5, "is_encoder_decoder=True"),
    ({}, {**BERT, "is_decoder": True}, "is_decoder=True"),
    ({}, {**QWEN3, "cross_attention_layers": [3, 8]}, "cross_attention_layers="),
    ({"max_total_tokens": 8}, QWEN3, "max_total_tokens=8 is not a multiple of page_size=16"),
    ({"max_total_tokens": 1000}, QWEN3, "max_total_tokens=1000 is not a multiple of page_size=16"),
    ({"kv_cache": "paged", "context_parallel": True}, QWEN3, "context_parallel=true"),
    ({"kv_cache": "paged", "context_parallel_size": 4}, QWEN3, "context_parallel_size=4"),
    ({"kv_cache": "paged", "kv_cache_dtype": "nvfp4"}, QWEN3, "kv_cache_dtype=nvfp4: fp4"),
    ({"kv_cache": "paged", "hierarchical_kv": True}, QWEN3, "hierarchical_kv=true"),
    ({"kv_cache": "paged", "sparse_kv": True}, QWEN3, "sparse_kv=true"),
    ({"kv_cache": "paged", "prefill_chunk_tokens": 64}, BERT, "prefill_chunk_tokens=64 .*model_type='bert'"),
    ({"kv_cache": "paged", "prefix_cache": True}, BERT, "prefix_cache=true .*model_type='bert'"),
    ({"kv_cache": "paged", "skip_kv": "on", "prefix_cache": True}, QWEN3, "skip_kv=on .*prefix_cache=true"),
    ({"kv_cache": "paged", "skip_kv": "on", "kv_cache_dtype": "float8_e4m3fn"}, QWEN3, "skip_kv=on .*float8"),
    ({"kv_cache": "paged", "skip_kv": "on"}, {**BERT, "is_decoder": True}, "skip_kv=on .*is_decoder=True"),
    ({"kv_cache": "paged"}, DEEPSEEK, "MLA.*kv_lora_rank=512"),
]


@pytest.mark.parametrize(("values", "config"), LEGAL)
def test_legal_settings_pass_unchanged(values: dict[str, Any], config: dict[str, Any]) -> None:
    """Nothing is dropped or replaced."""
    settings = KVSettings(**values)
    assert check_kv(settings, config, {}) == settings


@pytest.mark.parametrize(("values", "config", "said"), ILLEGAL)
def test_illegal_settings_are_named(values: dict[str, Any], config: dict[str, Any], said: str) -> None:
    """The message holds the setting, or the entry of the model's config, and its value."""
    with pytest.raises(KVSettingsError, match=said):
        check_kv(KVSettings(**values), config, {})


@pytest.mark.parametrize(("config", "kind", "evidence"), NOT_PLAIN, ids=NAMES)
def test_only_plain_multi_head_attention_goes_without_a_pool(
    config: dict[str, Any], kind: KVKind, evidence: str
) -> None:
    """Other families are recognised from config.json, named, and refused with `kv_cache: none`."""
    assert describe_kv(config).kind is kind
    for shown in (config, {"model_type": "multimodal", "text_config": config}):
        with pytest.raises(KVSettingsError) as refusal:
            check_kv(KVSettings(), shown, {})
        assert kind.value in str(refusal.value)
        assert evidence in str(refusal.value)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("qwen3", KVKind.MULTI_HEAD),
        ("qwen3_vl", KVKind.MULTI_HEAD),
        ("bert", KVKind.MULTI_HEAD),
        ("mistral", KVKind.SLIDING_WINDOW),
        ("gemma3", KVKind.SLIDING_WINDOW),
        ("modernbert", KVKind.SLIDING_WINDOW),
        ("deepseek_v3", KVKind.LATENT),
        ("big_bird", KVKind.SPARSE),
        ("mamba2", KVKind.RECURRENT),
        ("qwen3_next", KVKind.RECURRENT),
        ("jamba", KVKind.RECURRENT),
        ("lfm2", KVKind.RECURRENT),
    ],
)
def test_transformers_own_configurations_are_recognised(model_type: str, kind: KVKind) -> None:
    """Spelt as transformers spells them, with every default filled in."""
    assert describe_kv(AutoConfig.for_model(model_type).to_dict()).kind is kind


def test_a_window_that_is_switched_off_is_none() -> None:
    """Qwen2.5 and Qwen3 carry sliding_window beside use_sliding_window: false."""
    config = {**QWEN3, "sliding_window": 4096, "layer_types": ["full_attention"] * 2}
    assert describe_kv(config).kind is KVKind.MULTI_HEAD


def test_all_reasons_are_told_at_once() -> None:
    """Someone who has three mistakes need not start three times."""
    settings = KVSettings(prefix_cache=True, prefill_chunk_tokens=8, sparse_kv=True)
    with pytest.raises(KVSettingsError) as refusal:
        check_kv(settings, QWEN3, {})
    assert all(name in str(refusal.value) for name in ("prefix_cache", "prefill_chunk_tokens", "sparse_kv"))


@pytest.mark.parametrize(("value", "switch"), [("0", "off"), ("1", "on")])
@pytest.mark.parametrize("before", ["auto", "on", "off"])
def test_the_environment_is_over_the_setting(before: str, value: str, switch: str) -> None:
    """EPD_SKIP_KV says 0 or 1, whatever skip_kv says."""
    settings = KVSettings.model_validate({"kv_cache": "paged", "skip_kv": before})
    assert check_kv(settings, QWEN3, {"EPD_SKIP_KV": value}).skip_kv == switch


def test_the_environment_is_checked_like_the_setting() -> None:
    """Switched off by EPD_SKIP_KV, `kv_cache: none` is refused too; so are other values than 0 and 1."""
    with pytest.raises(KVSettingsError, match=r"EPD_SKIP_KV=0 \(skip_kv=off\)"):
        check_kv(KVSettings(), QWEN3, {"EPD_SKIP_KV": "0"})
    with pytest.raises(KVSettingsError, match=r"EPD_SKIP_KV=1 .*prefix_cache"):
        check_kv(KVSettings(kv_cache="paged", prefix_cache=True), QWEN3, {"EPD_SKIP_KV": "1"})
    with pytest.raises(KVSettingsError, match="must be 0 or 1, got 'yes'"):
        check_kv(KVSettings(), QWEN3, {"EPD_SKIP_KV": "yes"})


@pytest.mark.parametrize(
    "values", [{"kv_cahce": "none"}, {"kv_cache": "some"}, {"page_size": 0}, {"prefill_chunk_tokens": 0}]
)
def test_unknown_keys_and_values_are_refused(values: dict[str, Any]) -> None:
    """A misspelt setting is an error, not a default."""
    with pytest.raises(ValidationError):
        KVSettings.model_validate(values)


def test_storage_dtypes() -> None:
    """auto stores the model's own dtype."""
    assert storage_dtype(KVSettings()) is None
    assert storage_dtype(KVSettings(kv_cache_dtype="float8_e4m3fn")) is torch.float8_e4m3fn
    with pytest.raises(KVSettingsError, match="fp4"):
        storage_dtype(KVSettings(kv_cache_dtype="fp4"))
