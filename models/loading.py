"""Loading one part of a checkpoint into transformers' own module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError

_NAMED_AT_MOST = 10


def load_part(
    class_name: str,
    checkpoint: Checkpoint,
    prefix: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    not_ours: Sequence[str] = (),
    **arguments: object,
) -> Any:
    """transformers' `class_name(config, **arguments)` with the tensors under `prefix`, for inference.

    Only the files that hold such a tensor are opened. `not_ours`: names after the prefix (or starts of
    names) that belong to another part, such as a head.
    Raises CheckpointError that names the weights when some are missing, left over or of another shape.
    """
    # Imported here: its models take seconds to import, and an Ingress loads none.
    import transformers

    from epd.models.attention import IMPLEMENTATION

    tensors = {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint.read_tensors(prefix).items()
        if not name.removeprefix(prefix).startswith(tuple(not_ours))
    }
    model, info = getattr(transformers, class_name).from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation=IMPLEMENTATION,
        ignore_mismatched_sizes=True,  # they are refused below, by name
        output_loading_info=True,
        **arguments,
    )
    troubles = [
        _listed("missing", [prefix + name for name in info["missing_keys"]]),
        _listed("unexpected", [prefix + name for name in info["unexpected_keys"]]),
        _listed(
            "of another shape",
            [f"{prefix}{name} {list(has)} not {list(wants)}" for name, has, wants in info["mismatched_keys"]],
        ),
    ]
    if any(troubles):
        told = "; ".join(filter(None, troubles))
        raise CheckpointError(f"{checkpoint.name} does not fit {class_name}: {told}")
    return model.eval().requires_grad_(False).to(device)


def _listed(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _NAMED_AT_MOST} more" if len(names) > _NAMED_AT_MOST else ""
    return f"{what}: {', '.join(sorted(names)[:_NAMED_AT_MOST])}{more}"
