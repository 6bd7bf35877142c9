"""Synthetic pictures and captions: deterministic, distinct, and split by construction."""

from __future__ import annotations

import random

import pytest

from epd.demo.pictures import HELD_OUT, TRAINING, VALIDATION, TrainingPairs, gallery
from epd.demo.shapes import CLASSES, ShapeClass, caption, generator, render, render_png


def test_a_seed_decides_the_pixels() -> None:
    """Two generators of one split and seed give the same bytes and the same words."""
    one, two = generator(TRAINING, 5), generator(TRAINING, 5)
    assert [render_png(what, one) for what in CLASSES[:6]] == [render_png(what, two) for what in CLASSES[:6]]
    assert caption(CLASSES[0], one) == caption(CLASSES[0], two)


def test_splits_draw_from_different_streams() -> None:
    """No split and seed starts where another does, so that no held-out rendering was trained on."""
    states = {
        generator(split, seed).getstate() for split in (TRAINING, VALIDATION, HELD_OUT) for seed in range(50)
    }
    assert len(states) == 150


def test_training_never_shows_a_held_out_picture() -> None:
    """The first training batches share no picture with the held-out and the validation gallery."""
    batches = TrainingPairs(seed=0)
    trained_on = {pair.picture for _ in range(5) for pair in batches.next_batch()}
    kept_back = {pair.picture for split in (VALIDATION, HELD_OUT) for pair in gallery(split, per_class=2)}
    assert len(trained_on) == 5 * len(CLASSES)
    assert not trained_on & kept_back


def test_a_batch_holds_every_class_once() -> None:
    """A training batch has one pair of each of the 48 classes, so that no two of its captions agree."""
    batch = TrainingPairs(seed=1).next_batch()
    assert sorted(pair.what for pair in batch) == sorted(CLASSES)
    assert len(CLASSES) == 48


def test_a_gallery_lies_class_by_class() -> None:
    """A gallery holds the asked number of different renderings of each class, under one caption."""
    pairs = gallery(HELD_OUT, per_class=3)
    assert [pair.what for pair in pairs] == [what for what in CLASSES for _ in range(3)]
    assert len({pair.picture for pair in pairs}) == 3 * len(CLASSES)
    assert len({pair.words for pair in pairs}) == len(CLASSES)


def test_every_caption_names_colour_and_shape() -> None:
    """Each wording holds both attributes of what it describes."""
    rng = random.Random(0)
    what = ShapeClass("cyan", "diamond")
    assert all("cyan" in words and "diamond" in words for words in (caption(what, rng) for _ in range(50)))


def test_the_centre_has_the_colour() -> None:
    """The middle of a rendering is nearest to the colour of its class."""
    rng = generator(HELD_OUT, 0)
    for what in CLASSES:
        picture = render(what, rng)
        red, green, blue = picture.getpixel((picture.width // 2, picture.height // 2))  # type: ignore[misc]
        assert _nearest((red, green, blue)) == what.colour


def test_an_unknown_shape_is_refused() -> None:
    """A shape that there is no drawing for raises ValueError with the ones there are."""
    with pytest.raises(ValueError, match="no such shape: 'blob'; there are circle"):
        render(ShapeClass("red", "blob"), random.Random(0))


def _nearest(colour: tuple[float, float, float]) -> str:
    from epd.demo.shapes import COLOURS

    return min(
        COLOURS, key=lambda name: sum((a - b) ** 2 for a, b in zip(COLOURS[name], colour, strict=True))
    )
