"""The splits: training pairs without end, and held-out renderings of every class."""

from __future__ import annotations

import random
from dataclasses import dataclass

from epd.demo.shapes import CLASSES, ShapeClass, caption, generator, render_png

TRAINING = "train"
VALIDATION = "validation"  # looked at while training
HELD_OUT = "held-out"  # looked at once, at the end


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture (the bytes of a PNG file) and words that describe it."""

    what: ShapeClass
    picture: bytes
    words: str


class TrainingPairs:
    """Batches of one new pair of every class, in random order."""

    def __init__(self, seed: int) -> None:
        self._rng = generator(TRAINING, seed)

    def next_batch(self) -> list[Pair]:
        """The next 48 pairs; no two batches share a rendering."""
        classes = self._rng.sample(CLASSES, len(CLASSES))
        return [draw_pair(what, self._rng) for what in classes]


def draw_pair(what: ShapeClass, rng: random.Random) -> Pair:
    """A new rendering of `what` with a wording drawn at random."""
    return Pair(what, render_png(what, rng), caption(what, rng))


def gallery(split: str, per_class: int, seed: int = 0) -> list[Pair]:
    """`per_class` new renderings of every class with its plainest caption, drawn from the stream `split`."""
    rng = generator(split, seed)
    return [Pair(what, render_png(what, rng), caption(what)) for what in CLASSES for _ in range(per_class)]
