"""Trains the demo checkpoint: `python -m epd.demo.train --out demo/checkpoint`. Minutes on one core.

48 new pairs a step, one of each class; symmetric InfoNCE and, for the first 70 % of the steps, two attribute
heads that are then thrown away. Deterministic for one version of PyTorch on one kind of machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from epd.demo.checkpoint_format import save_weights, write_checkpoint
from epd.demo.initial_weights import initialise
from epd.demo.objective import AttributeHeads, contrastive_loss
from epd.demo.pictures import VALIDATION, Pair, TrainingPairs, gallery
from epd.demo.retrieval import Retrieval
from epd.demo.schedule import Schedule
from epd.demo.training_model import TrainingModel
from epd.models.checkpoint import Checkpoint

VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
TEXT = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
MIN_PIXELS = 64 * 64
MAX_PIXELS = 256 * 256
_BETAS = (0.9, 0.98)
_WEIGHT_DECAY = 0.02
_LARGEST_GRADIENT = 1.0
_REPORT_EVERY = 50  # steps


def train(out: Path, num_steps: int, seed: int) -> None:
    """Write an initialised checkpoint to `out`, train it there, and save its weights."""
    start = time.perf_counter()
    write_checkpoint(out, vision=VISION, text=TEXT, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS, seed=seed)
    model = TrainingModel(Checkpoint.open(out))
    initialise(model.full, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = AttributeHeads(model.dim, model.row_dim)
    optimizer = _optimizer(model.full, heads)
    schedule = Schedule(num_steps)
    pairs = TrainingPairs(seed)
    validation = gallery(VALIDATION, per_class=1)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        loss = _learn(model, heads, optimizer, pairs.next_batch(), schedule.heads_weight(step))
        if step % _REPORT_EVERY == 0 or step == num_steps - 1:
            found = _validate(model, validation)
            print(
                f"step {step:4d}  loss {loss:.4f}  caption to picture {found.caption_to_picture:.3f}  "
                f"picture to caption {found.picture_to_caption:.3f}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    save_weights(out, model.full)
    print(f"{sum(parameter.numel() for parameter in model.full.parameters())} parameters, saved to {out}")


def _learn(
    model: TrainingModel,
    heads: AttributeHeads,
    optimizer: torch.optim.Optimizer,
    batch: list[Pair],
    heads_weight: float,
) -> float:
    """One step; returns the contrastive loss."""
    rows, grids = model.encode([pair.picture for pair in batch])
    pictures, captions = model.embed([pair.words for pair in batch], rows, grids).chunk(2)
    loss = contrastive_loss(pictures, captions)
    of_heads = heads.loss(pictures, captions, model.row_means(rows, grids), [pair.what for pair in batch])
    optimizer.zero_grad()
    torch.autograd.backward(loss + heads_weight * of_heads)
    nn.utils.clip_grad_norm_(model.full.parameters(), _LARGEST_GRADIENT)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _validate(model: TrainingModel, pairs: list[Pair]) -> Retrieval:
    rows, grids = model.encode([pair.picture for pair in pairs])
    pictures, captions = model.embed([pair.words for pair in pairs], rows, grids).chunk(2)
    return Retrieval.measure(pictures, captions, per_class=1)


def _optimizer(model: nn.Module, heads: nn.Module) -> torch.optim.Optimizer:
    """AdamW; only matrices and embeddings of the model decay."""
    decaying = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": decaying, "weight_decay": _WEIGHT_DECAY},
        {"params": [*others, *heads.parameters()], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=_BETAS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    disable_progress_bar()
    train(arguments.out, arguments.steps, arguments.seed)


if __name__ == "__main__":
    main()
