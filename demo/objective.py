"""What the demo model is trained for: captions and pictures of one class meet, all others part."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from epd.demo.shapes import COLOURS, SHAPES, ShapeClass

TEMPERATURE = 0.07
_VECTOR_SCALE = 10.0  # unit vectors are too short for a linear classifier to start on
_CAPTION_WEIGHT = 0.5


def contrastive_loss(pictures: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
    """Symmetric InfoNCE (Radford et al., 2021, figure 3) of unit vectors `[B, dim]`; row i matches row i."""
    scores = captions @ pictures.T / TEMPERATURE
    target = torch.arange(len(scores))
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


class AttributeHeads(nn.Module):
    """Colour and shape classifiers on vectors and on the vision tower's rows: a scaffold, thrown away."""

    def __init__(self, dim: int, row_dim: int) -> None:
        super().__init__()
        self.of_vector = nn.Linear(dim, len(COLOURS) + len(SHAPES))
        self.of_rows = nn.Linear(row_dim, len(COLOURS) + len(SHAPES))

    def loss(
        self, pictures: torch.Tensor, captions: torch.Tensor, rows: torch.Tensor, classes: list[ShapeClass]
    ) -> torch.Tensor:
        """Cross-entropy of colour and shape, read off vectors `[B, dim]` and mean rows `[B, row_dim]`."""
        labels = self._labels(classes)
        from_pictures = self._cross_entropy(self.of_vector(pictures * _VECTOR_SCALE), labels)
        from_captions = self._cross_entropy(self.of_vector(captions * _VECTOR_SCALE), labels)
        from_rows = self._cross_entropy(self.of_rows(rows), labels)
        return from_pictures + _CAPTION_WEIGHT * from_captions + from_rows

    @staticmethod
    def _cross_entropy(logits: torch.Tensor, labels: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        colour_logits, shape_logits = logits[:, : len(COLOURS)], logits[:, len(COLOURS) :]
        return F.cross_entropy(colour_logits, labels[0]) + F.cross_entropy(shape_logits, labels[1])

    @staticmethod
    def _labels(classes: list[ShapeClass]) -> tuple[torch.Tensor, torch.Tensor]:
        colours = list(COLOURS)
        return (
            torch.tensor([colours.index(what.colour) for what in classes]),
            torch.tensor([SHAPES.index(what.shape) for what in classes]),
        )
