"""The calculator and the simulated fleet say what they should where the answer is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fleet import Recent, at_random, by_affinity, run, scenarios
from benchmarks.sizing import Load, Rates, capacity_for, lru_hit_rate, replicas, zipf


def test_replicas_follow_from_rates() -> None:
    """Half of the pictures' tokens go to encoders at a hit rate of one half; embedders see them all."""
    load = Load(items=10, pictures=2, picture_tokens=100, text_tokens=50)
    rates = Rates(encode=1000, prefill=500, row_bytes=1)
    assert replicas(load, rates, hit_rate=0.5, utilisation=0.5) == (2.0, 10.0)


def test_the_hit_rate_is_that_of_a_simulated_cache() -> None:
    """Che's approximation agrees with a least-recently-used cache that really runs, to within a hundredth."""
    chances = zipf(5000, 1.0)
    cache = Recent(400)
    asked = np.random.default_rng(0).choice(5000, 60_000, p=chances)
    hits = 0
    for number, picture in enumerate(asked.tolist()):
        hit = cache.use(str(picture))
        cache.put(str(picture))
        hits += hit and number >= 20_000
    assert hits / 40_000 == pytest.approx(lru_hit_rate(chances, 400), abs=0.01)


def test_capacity_and_hit_rate_are_inverse() -> None:
    """The capacity for a hit rate has that hit rate, and one tenth less has a lower one."""
    chances = zipf(10_000, 0.8)
    pictures = capacity_for(chances, 0.7)
    assert lru_hit_rate(chances, pictures) == pytest.approx(0.7, abs=1e-3)
    assert lru_hit_rate(chances, 0.9 * pictures) < 0.7
    assert lru_hit_rate(chances, 10_000) == 1


def test_affinity_encodes_each_picture_once() -> None:
    """While pools hold what they own, affinity encodes no picture twice, and random routing encodes many."""
    scenario = replace(scenarios(20, 2000)[2], pool=10_000)
    owned, anywhere = run(scenario, by_affinity), run(scenario, at_random(1))
    assert owned.num_encodes == owned.num_distinct
    assert anywhere.num_encodes > 1.5 * owned.num_encodes
    assert owned.imbalance < 3


def test_with_a_store_that_holds_all_only_simultaneous_calls_encode_twice() -> None:
    """Then routing matters for calls at the same time alone: random routing is within a few per cent."""
    scenario = scenarios(20, 2000)[0]
    owned, anywhere = run(scenario, by_affinity), run(scenario, at_random(1))
    assert owned.num_encodes == owned.num_distinct <= anywhere.num_encodes < 1.1 * owned.num_distinct
