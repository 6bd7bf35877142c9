"""The model families that can be served, by `model_type`; each is imported only when it is asked for."""

from __future__ import annotations

import torch

from epd.models.base import Family
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError

__all__ = ["DTYPES", "Family", "family_of", "resolve_dtype", "supported_types"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _bert(checkpoint: Checkpoint) -> Family:
    from epd.models.bert import BertFamily

    return BertFamily(checkpoint)


def _qwen3(checkpoint: Checkpoint) -> Family:
    from epd.models.qwen3 import Qwen3Family

    return Qwen3Family(checkpoint)


def _qwen3_vl(checkpoint: Checkpoint) -> Family:
    from epd.models.qwen3_vl import Qwen3VLFamily

    return Qwen3VLFamily(checkpoint)


_FAMILIES = {"bert": _bert, "qwen3": _qwen3, "qwen3_vl": _qwen3_vl}


def supported_types() -> tuple[str, ...]:
    """Every `model_type` that can be served."""
    return tuple(sorted(_FAMILIES))


def family_of(checkpoint: Checkpoint) -> Family:
    """Raises CheckpointError when no family serves the checkpoint's model type."""
    if checkpoint.model_type not in _FAMILIES:
        raise CheckpointError(
            f"{checkpoint.name} is of model_type {checkpoint.model_type!r}; supported: "
            f"{', '.join(supported_types())}"
        )
    return _FAMILIES[checkpoint.model_type](checkpoint)


def resolve_dtype(checkpoint: Checkpoint, name: str, device: torch.device | str) -> torch.dtype:
    """The dtype to load weights in: `"float32"`, `"bfloat16"`, `"float16"` or `"auto"`.

    auto: what the checkpoint says on CUDA, float32 on a CPU, where narrower types are slower.
    Raises ValueError for any other name.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}; got {name!r}")
    if torch.device(device).type == "cpu":
        return torch.float32
    said = checkpoint.config.dtype or checkpoint.config.get_text_config().dtype
    return said if isinstance(said, torch.dtype) else checkpoint.weights.dtype("")
