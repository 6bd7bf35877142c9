"""Ownership of keys, apart from Ray."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from epd.deployments.affinity import group_by_owner, load_bound, order_within_bound, rank

KEYS = [f"namespace/{number:064x}" for number in range(4000)]
REPLICAS = ["r0", "r1", "r2", "r3"]


@dataclass(frozen=True)
class Picture:
    key: str


def owners(replicas: list[str]) -> dict[str, str]:
    return {key: rank(key, replicas)[0] for key in KEYS}


def test_order_does_not_depend_on_how_replicas_are_listed() -> None:
    """Two callers that learnt of the replicas in different order agree on every key."""
    assert [rank(key, REPLICAS) for key in KEYS] == [rank(key, REPLICAS[::-1]) for key in KEYS]


@pytest.mark.parametrize("num_before", [1, 2, 3])
def test_a_new_replica_takes_its_share_and_moves_nothing_else(num_before: int) -> None:
    """With one replica more, about one key in the new number moves, each of them to the new one."""
    before, after = owners(REPLICAS[:num_before]), owners(REPLICAS[: num_before + 1])
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {REPLICAS[num_before]}
    assert len(moved) / len(KEYS) == pytest.approx(1 / (num_before + 1), rel=0.1)


def test_a_lost_replica_moves_only_its_own_keys_and_spreads_them() -> None:
    """Keys of living replicas stay; those of the lost one go to every other."""
    before, after = owners(REPLICAS), owners(REPLICAS[1:])
    assert all(after[key] == owner for key, owner in before.items() if owner != "r0")
    inherited = Counter(after[key] for key, owner in before.items() if owner == "r0")
    assert set(inherited) == set(REPLICAS[1:])
    assert min(inherited.values()) > 0.8 * inherited.total() / 3


def test_keys_are_spread_evenly() -> None:
    """No replica owns a tenth more or fewer keys than its share."""
    counts = Counter(owners(REPLICAS).values())
    assert all(count == pytest.approx(len(KEYS) / 4, rel=0.1) for count in counts.values())


def test_each_owner_gets_one_group_in_order() -> None:
    """Grouping loses nothing, keeps order, and makes one group for each replica that owns something."""
    pictures = [Picture(key) for key in KEYS[:100]]
    groups = group_by_owner(pictures, REPLICAS)
    assert sorted(picture.key for group in groups for picture in group) == sorted(KEYS[:100])
    assert [len({rank(picture.key, REPLICAS)[0] for picture in group}) for group in groups] == [1] * 4
    assert all(group == sorted(group, key=lambda picture: picture.key) for group in groups)


def test_without_known_replicas_all_is_one_group() -> None:
    """Before the router heard of a replica, one call waits for the first."""
    assert group_by_owner([Picture("a"), Picture("b")], []) == [[Picture("a"), Picture("b")]]


def test_nothing_makes_no_group() -> None:
    """No picture, no call."""
    assert group_by_owner([], REPLICAS) == []


def test_a_saturated_owner_is_tried_last() -> None:
    """Keys of a replica above the bound go to the next in their own order, the rest stays."""
    owner, *others = rank("key", REPLICAS)
    loads = dict.fromkeys(others, 1) | {owner: 10}
    assert order_within_bound("key", loads, load_factor=1.5, min_load=4) == [*others, owner]


def test_an_owner_below_the_least_load_keeps_its_keys() -> None:
    """A few calls are no saturation, however idle the others are."""
    loads = dict.fromkeys(REPLICAS, 0) | {rank("key", REPLICAS)[0]: 9}
    assert order_within_bound("key", loads, load_factor=1.5, min_load=10) == rank("key", REPLICAS)


def test_under_even_load_every_key_stays_with_its_owner() -> None:
    """High load alone spills nothing."""
    loads = dict.fromkeys(REPLICAS, 1000)
    assert order_within_bound("key", loads, load_factor=1.5, min_load=1) == rank("key", REPLICAS)


@pytest.mark.parametrize("loads", [[0], [7], [5, 5], [100, 0, 0], [9, 9, 8, 9]])
def test_some_replica_is_always_below_the_bound(loads: list[int]) -> None:
    """The bound can always be kept: that is what a factor above one buys."""
    assert min(loads) < load_bound(loads, load_factor=1.01, min_load=1)


def test_bounded_loads_hold_for_the_worst_key() -> None:
    """One key asked for by everybody loads no replica above the bound that held when it was sent."""
    loads = dict.fromkeys(REPLICAS, 0)
    for _ in range(200):
        chosen = order_within_bound("hot", loads, load_factor=1.5, min_load=8)[0]
        assert loads[chosen] < load_bound(loads.values(), load_factor=1.5, min_load=8)
        loads[chosen] += 1
    assert max(loads.values()) <= 1.5 * 201 / 4 + 1
