"""How keys are shared among encoder replicas: what moves when replicas come and go, the spread, the cost.

    python -m benchmarks.affinity

Rendezvous hashing (`epd.deployments.affinity`) against the remainder of the key's hash by the number of
replicas (the baseline), and a hash ring with 100 virtual nodes for each replica. Keeps what it printed in
benchmarks/results/affinity.txt.
"""

from __future__ import annotations

import bisect
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.report import RESULTS, machine, table
from epd.deployments.affinity import owner

NUM_KEYS = 20_000
SCALINGS = ((1, 2), (2, 3), (1, 3), (3, 1), (3, 4), (8, 9), (16, 15))
VIRTUAL_NODES = 100
REPEATS = 5

# From the keys and the replicas' names to each key's replica.
Placement = Callable[[Sequence[str], Sequence[str]], list[str]]


def remainder(keys: Sequence[str], replicas: Sequence[str]) -> list[str]:
    return [replicas[_hash(key) % len(replicas)] for key in keys]


def ring(keys: Sequence[str], replicas: Sequence[str]) -> list[str]:
    nodes = sorted((_hash(f"{replica}:{i}"), replica) for replica in replicas for i in range(VIRTUAL_NODES))
    places = [place for place, _ in nodes]
    return [nodes[bisect.bisect(places, _hash(key)) % len(nodes)][1] for key in keys]


def rendezvous(keys: Sequence[str], replicas: Sequence[str]) -> list[str]:
    return [owner(key, replicas) for key in keys]


PLACEMENTS: dict[str, Placement] = {"remainder": remainder, "ring": ring, "rendezvous": rendezvous}


def main() -> None:
    keys = [f"{_hash('namespace'):x}/{i:064x}" for i in range(NUM_KEYS)]
    report = [machine(f"{NUM_KEYS} keys"), "", "share of keys that move; least: what any placement must move"]
    rows = [_moved_row(keys, before, after) for before, after in SCALINGS]
    report += [table(("replicas", "least", *PLACEMENTS), rows), ""]
    report += ["keys of the fullest replica, times the mean; us: CPU microseconds a key, best of 5"]
    spread_header = [cell for name in PLACEMENTS for cell in (name, "us")]
    report += [table(("replicas", *spread_header), [_spread_row(keys, num) for num in (2, 3, 8, 16, 64)])]
    text = "\n".join(report) + "\n"
    print(text, end="")
    (RESULTS / "affinity.txt").write_text(text)


def _moved_row(keys: Sequence[str], before: int, after: int) -> list[str]:
    shares = []
    for place in PLACEMENTS.values():
        pairs = zip(place(keys, _names(before)), place(keys, _names(after)), strict=True)
        shares.append(sum(old != new for old, new in pairs) / len(keys))
    least = abs(before - after) / max(before, after)
    return [f"{before} -> {after}", f"{least:.1%}", *(f"{share:.1%}" for share in shares)]


def _spread_row(keys: Sequence[str], num_replicas: int) -> list[str]:
    row = [str(num_replicas)]
    for place in PLACEMENTS.values():
        counts = Counter(place(keys, _names(num_replicas)))
        cost = min(_cpu_seconds(place, keys, num_replicas) for _ in range(REPEATS))
        row += [f"{max(counts.values()) * num_replicas / len(keys):.2f}", f"{cost / len(keys) * 1e6:.1f}"]
    return row


def _cpu_seconds(place: Placement, keys: Sequence[str], num_replicas: int) -> float:
    start = time.thread_time()
    place(keys, _names(num_replicas))
    return time.thread_time() - start


def _names(count: int) -> list[str]:
    return [f"replica-{i}" for i in range(count)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


if __name__ == "__main__":
    main()
