"""What a checkpoint of the sentence-transformers format says about pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError
from epd.models.pooling import Pooling

_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
    "mean": "mean",
    "cls": "first",
    "lasttoken": "last",
}


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """`pooling` and `normalize`, and the longest input if it names one, in tokens."""

    pooling: Pooling
    normalize: bool
    max_tokens: int | None

    @classmethod
    def read(cls, checkpoint: Checkpoint, default: Pooling) -> SentenceConfig:
        """From `modules.json` and what it points at; `default` and unit length where there is no such file.

        Raises CheckpointError for modules or pooling modes that are not supported.
        """
        limits = checkpoint.read_json("sentence_bert_config.json") or {}
        max_tokens = limits.get("max_seq_length")
        modules = checkpoint.read_json("modules.json")
        if modules is None:
            return cls(default, True, max_tokens)
        pooling, normalize = default, False
        for module in modules:
            kind = str(module["type"]).rpartition(".")[2]
            if kind == "Pooling":
                pooling = _pooling(checkpoint, checkpoint.read_json(f"{module['path']}/config.json") or {})
            elif kind == "Normalize":
                normalize = True
            elif kind != "Transformer":
                raise CheckpointError(f"{checkpoint.name}: a module of type {kind} is not supported")
        return cls(pooling, normalize, max_tokens)


def _pooling(checkpoint: Checkpoint, settings: dict[str, Any]) -> Pooling:
    chosen = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
    if "pooling_mode" in settings:
        chosen = [str(settings["pooling_mode"])]
    if len(chosen) != 1 or chosen[0] not in _POOLINGS:
        raise CheckpointError(f"{checkpoint.name}: pooling by {chosen} is not supported")
    return _POOLINGS[chosen[0]]
