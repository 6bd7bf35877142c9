"""Vectors against transformers' plain forward of the whole model, one item at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.pictures import encoded, picture, png
from tests.models.pipeline import Pipeline
from tests.oracle import Oracle, assert_same

Item = dict[str, Any]


def cases(photo: bytes) -> dict[str, Item]:
    return {
        "text": {"parts": ["a red circle on a dark background"]},
        "image": {"parts": [photo]},
        "two images of different sizes": {"parts": [png(150, 90, 1), png(64, 200, 2)]},
        "image between texts": {"parts": ["before\n", png(120, 120, 3), "\nand after"]},
        "images before text": {"parts": [png(90, 60, 4), photo, "which is larger?"]},
        "text and instruction": {"parts": ["blue star"], "instruction": " Find the picture that matches "},
        "image and instruction": {"parts": [png(75, 75, 5)], "instruction": "What colour is it?"},
        "transparent image": {"parts": [encoded(picture(100, 70, 6, "RGBA"))]},
    }


NAMES = tuple(cases(b""))


@pytest.fixture(params=["demo", "sharded"])
def pair(request: pytest.FixtureRequest) -> tuple[Pipeline, Oracle]:
    return tuple(request.getfixturevalue(f"{request.param}_{part}") for part in ("pipeline", "oracle"))


@pytest.mark.parametrize("name", NAMES)
def test_an_item_alone(pair: tuple[Pipeline, Oracle], photo: bytes, name: str) -> None:
    """The vector of one item equals the plain forward's."""
    pipeline, oracle = pair
    item = cases(photo)[name]
    assert_same(pipeline.embed([item])[0], oracle.embed(item))


def test_all_items_in_one_batch(pair: tuple[Pipeline, Oracle], photo: bytes) -> None:
    """Items of every kind and length, packed together twice over, get the vectors they get alone."""
    pipeline, oracle = pair
    items = [*cases(photo).values(), *reversed(cases(photo).values())]
    for vector, item in zip(pipeline.embed(items), items, strict=True):
        assert_same(vector, oracle.embed(item))


def test_token_ids_are_those_of_the_template(pair: tuple[Pipeline, Oracle], photo: bytes) -> None:
    """Prompts and expanded placeholders equal what the processor makes of the chat template."""
    pipeline, oracle = pair
    for item in cases(photo).values():
        expected = oracle.inputs(item)["input_ids"][0].numpy()
        np.testing.assert_array_equal(pipeline.sequence(item).token_ids, expected)


def test_dimensions_cut_before_normalisation(pair: tuple[Pipeline, Oracle], photo: bytes) -> None:
    """With `dimensions` the first values are kept and scaled to unit length."""
    pipeline, oracle = pair
    item = {"parts": [photo, "with text"]}
    vector = pipeline.embed([item], dimensions=17)[0]
    assert_same(vector, oracle.embed(item, dimensions=17))
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
