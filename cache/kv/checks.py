"""Which KV settings a model can be started with; pure, so that it runs before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from epd.cache.kv.families import KVKind, ModelKV, describe_kv
from epd.cache.kv.settings import KVSettings

SKIP_VARIABLE = "EPD_SKIP_KV"

_STORAGE_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "float8_e4m3fn": torch.float8_e4m3fn}


class KVSettingsError(ValueError):
    """Settings that cannot serve this model; the message names each setting and its value."""


def storage_dtype(settings: KVSettings) -> torch.dtype | None:
    """What `kv_cache_dtype` stores; None for the model's own. Raises KVSettingsError for others."""
    if settings.kv_cache_dtype not in _STORAGE_DTYPES:
        raise KVSettingsError(_dtype_refusal(settings.kv_cache_dtype))
    return _STORAGE_DTYPES[settings.kv_cache_dtype]


def check_kv(settings: KVSettings, config: Mapping[str, Any], environ: Mapping[str, str]) -> KVSettings:
    """The settings in force: `settings` with `EPD_SKIP_KV` of `environ` laid over its switch.

    config: the model's parsed config.json. Raises KVSettingsError with every reason at once.
    """
    settings, switch = _with_environment(settings, environ)
    model = describe_kv(config)
    refusals = [*_never(settings)]
    if settings.kv_cache == "none":
        refusals += [f"kv_cache=none needs {why}" for why in _against_none(settings, model, switch)]
    else:
        refusals += _against_paged(settings, model, switch)
    if refusals:
        raise KVSettingsError("; ".join(refusals))
    return settings


def _with_environment(settings: KVSettings, environ: Mapping[str, str]) -> tuple[KVSettings, str]:
    value = environ.get(SKIP_VARIABLE)
    if value is None:
        return settings, f"skip_kv={settings.skip_kv}"
    if value not in ("0", "1"):
        raise KVSettingsError(f"{SKIP_VARIABLE} must be 0 or 1, got {value!r}")
    settings = settings.model_copy(update={"skip_kv": "on" if value == "1" else "off"})
    return settings, f"{SKIP_VARIABLE}={value} (skip_kv={settings.skip_kv})"


def _never(settings: KVSettings) -> Iterator[str]:
    if settings.context_parallel:
        yield "context_parallel=true: context parallelism is not built, with kv_cache none or paged"
    if settings.context_parallel_size > 1:
        yield (
            f"context_parallel_size={settings.context_parallel_size}: context parallelism is not built, "
            "with kv_cache none or paged"
        )
    if settings.hierarchical_kv:
        yield "hierarchical_kv=true: there is no hierarchical KV, with kv_cache none or paged"
    if settings.sparse_kv:
        yield "sparse_kv=true: there is no sparse KV, with kv_cache none or paged"
    if settings.kv_cache_dtype not in _STORAGE_DTYPES:
        yield _dtype_refusal(settings.kv_cache_dtype)
    if settings.max_total_tokens % settings.page_size:
        yield (
            f"max_total_tokens={settings.max_total_tokens} is not a multiple of "
            f"page_size={settings.page_size}"
        )


def _dtype_refusal(name: str) -> str:
    fp4 = "fp4" in name.lower() or "float4" in name.lower()
    why = "fp4 keys and values are not built" if fp4 else f"it must be one of {', '.join(_STORAGE_DTYPES)}"
    return f"kv_cache_dtype={name}: {why}"


def _against_none(settings: KVSettings, model: ModelKV, switch: str) -> Iterator[str]:
    if settings.skip_kv == "off":
        yield f"skipping, but {switch}"
    if model.generation:
        yield f"an embedding model, but the model's config has {model.generation}"
    if model.kind is not KVKind.MULTI_HEAD:
        yield f"plain multi-head attention, but the model has {model.kind} ({model.evidence})"
    if settings.prefill_chunk_tokens is not None:
        yield f"chunked prefill off, but prefill_chunk_tokens={settings.prefill_chunk_tokens}"
    if settings.prefix_cache:
        yield "prefix caching off, but prefix_cache=true"
    if settings.kv_cache_dtype == "float8_e4m3fn":
        yield "no storage dtype, but kv_cache_dtype=float8_e4m3fn"


def _against_paged(settings: KVSettings, model: ModelKV, switch: str) -> Iterator[str]:
    if model.kind not in (KVKind.MULTI_HEAD, KVKind.SLIDING_WINDOW):
        yield (
            "kv_cache=paged holds multi-head keys and values, but the model has "
            f"{model.kind} ({model.evidence})"
        )
    if model.bidirectional:
        but = f"needs causal attention, but the model is bidirectional ({model.bidirectional})"
        if settings.prefill_chunk_tokens is not None:
            yield f"prefill_chunk_tokens={settings.prefill_chunk_tokens} {but}"
        if settings.prefix_cache:
            yield f"prefix_cache=true {but}"
    if settings.skip_kv == "on":
        if model.generation:
            yield f"{switch} could never skip: the model generates ({model.generation})"
        if settings.prefix_cache:
            yield f"{switch} could never skip: prefix_cache=true keeps the keys and values of every batch"
        if settings.kv_cache_dtype == "float8_e4m3fn":
            yield f"{switch} could never skip: kv_cache_dtype=float8_e4m3fn does not store them verbatim"
