"""Which replica owns a key: rendezvous hashing with bounded loads. Pure, knows nothing of Ray.

Rendezvous (highest random weight) hashing: D. Thaler, C. Ravishankar, "Using name-based mappings to increase
hit rates", 1998. Bounded loads: V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded
Loads", 2016.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar


class Keyed(Protocol):
    """Whatever has a content key."""

    @property
    def key(self) -> str: ...


KeyedItem = TypeVar("KeyedItem", bound=Keyed)


def rank(key: str, replicas: Iterable[str]) -> list[str]:
    """The replicas in this key's own order of preference: the owner first, then whom it falls to.

    Every caller that knows the same replicas finds the same order. A replica that comes or goes moves only
    the keys that it owns: about one in `len(replicas)`.
    """
    return sorted(replicas, key=lambda replica: _weight(key, replica), reverse=True)


def owner(key: str, replicas: Iterable[str]) -> str:
    """The first of `rank`; "" when there is no replica."""
    return max(replicas, key=lambda replica: _weight(key, replica), default="")


def group_by_owner(items: Iterable[KeyedItem], replicas: Collection[str]) -> list[list[KeyedItem]]:
    """The items, order kept, in one group for each replica that owns any; in one when no replica is known."""
    groups: dict[str, list[KeyedItem]] = {}
    for item in items:
        groups.setdefault(owner(item.key, replicas), []).append(item)
    return list(groups.values())


def load_bound(loads: Collection[int], *, load_factor: float, min_load: int) -> int:
    """Calls in flight from which a replica counts as saturated: `load_factor` times the mean with one call
    more, but never less than `min_load`. With `load_factor` > 1 some replica is always below it."""
    return max(min_load, math.ceil(load_factor * (sum(loads) + 1) / len(loads)))


def order_within_bound(
    key: str, loads: Mapping[str, int], *, load_factor: float, min_load: int
) -> Sequence[str]:
    """The order in which to try replicas for a key: `rank`, with the saturated ones moved to the end.

    loads: calls in flight by replica, 0 where unknown.
    """
    bound = load_bound(loads.values(), load_factor=load_factor, min_load=min_load)
    return sorted(rank(key, loads), key=lambda replica: loads[replica] >= bound)


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{replica}|{key}".encode(), digest_size=8).digest()
