"""Settings of the KV cache and of skipping it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class KVSettings(BaseModel):
    """What a replica keeps of its keys and values. `cache/kv/checks.py` checks it against the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kv_cache: Literal["none", "paged"] = Field(
        default="none",
        description="none: no memory at all, every batch skips; paged: a pool of max_total_tokens",
    )
    skip_kv: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="auto: skip the paged write and gather wherever it changes nothing; on: also refuse to "
        "start where it never could; EPD_SKIP_KV=1 or 0 means on or off, over this",
    )
    page_size: int = Field(default=16, gt=0, description="tokens of one page")
    max_total_tokens: int = Field(
        default=16384,
        gt=0,
        description="tokens of one forward and of the pool, with memory behind them or not",
    )
    prefill_chunk_tokens: int | None = Field(
        default=None,
        gt=0,
        description="run at most this many tokens in one forward, longer sequences in pieces",
    )
    prefix_cache: bool = Field(default=False, description="reuse pages of prompts that start alike")
    kv_cache_dtype: str = Field(default="auto", description="auto: the model's; or float8_e4m3fn")
    context_parallel: bool = Field(default=False, description="not built: refused when true")
    context_parallel_size: int = Field(default=1, gt=0, description="not built: refused above 1")
    hierarchical_kv: bool = Field(default=False, description="not built: refused when true")
    sparse_kv: bool = Field(default=False, description="not built: refused when true")
