"""A simulated fleet of encoders: what it saves to send a picture to the replica that owns it.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --replicas 500 --requests 200000

Pictures are asked for by Zipf's law, at random times. A request whose rows lie in the store needs no encoder.
Others go to one: the owner of the key, chosen by the very function that the router calls
(epd.deployments.affinity), or any replica at random. A replica encodes one picture at a time; it joins calls
for a picture that it encodes already, and keeps the latest rows in its pool. Printed: the share of requests
that no encoding was done for, encodings (and how many for each distinct picture), the busiest replica's work
relative to the mean, and how long calls waited. Keeps what it printed in benchmarks/results/fleet.txt.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.report import RESULTS, machine, table
from benchmarks.sizing import zipf
from epd.deployments.affinity import order_within_bound

# As epd.deployments.router sets them.
LOAD_FACTOR, MIN_LOAD = 1.5, 64


class Recent:
    """Keys of the latest `capacity` pictures."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[str, None] = OrderedDict()

    def use(self, key: str) -> bool:
        """Whether the picture is held; it is the latest now."""
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        return True

    def put(self, key: str) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)


@dataclass
class Replica:
    """One encoder. Times are in seconds."""

    pool: Recent
    free_at: float = 0.0
    work_s: float = 0.0
    running: dict[str, float] = field(default_factory=dict)
    """When each picture that is queued or being encoded will be done."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """rate: requests a second. encode_s: seconds of one encoding. Sizes are in pictures; 0: none."""

    name: str
    num_replicas: int
    num_requests: int
    catalogue: int
    exponent: float
    rate: float
    encode_s: float
    pool: int
    store: int
    joins_at: float | None = None
    """When, as a share of all requests, a tenth more replicas join."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """hit_rate: of requests that no encoding was done for. imbalance: busiest replica over the mean."""

    hit_rate: float
    num_encodes: int
    num_distinct: int
    imbalance: float
    wait_p99_s: float


Route = Callable[[str, dict[str, int]], str]


def by_affinity(key: str, loads: dict[str, int]) -> str:
    """The owner, or the next in the key's order while the owner is saturated."""
    return order_within_bound(key, loads, load_factor=LOAD_FACTOR, min_load=MIN_LOAD)[0]


def at_random(seed: int) -> Route:
    """Any replica, whatever the key."""
    rng = random.Random(seed)
    return lambda _key, loads: rng.choice(list(loads))


def run(scenario: Scenario, route: Route, seed: int = 0) -> Outcome:
    """One run; the same seed brings the same requests."""
    rng = np.random.default_rng(seed)
    asked = rng.choice(
        scenario.catalogue, scenario.num_requests, p=zipf(scenario.catalogue, scenario.exponent)
    )
    times = np.cumsum(rng.exponential(1 / scenario.rate, scenario.num_requests))
    replicas = {f"replica-{i}": Replica(Recent(scenario.pool)) for i in range(scenario.num_replicas)}
    loads = dict.fromkeys(replicas, 0)
    store = Recent(scenario.store)
    ends: list[tuple[float, str, str, bool]] = []  # when, replica, key, whether it was an encoding
    waits: list[float] = []
    num_encodes = 0
    join_at = None if scenario.joins_at is None else int(scenario.joins_at * scenario.num_requests)

    def finish_until(now: float) -> None:
        while ends and ends[0][0] <= now:
            _, name, key, was_encoding = heapq.heappop(ends)
            loads[name] -= 1
            if was_encoding:
                replicas[name].running.pop(key)
                replicas[name].pool.put(key)
            if scenario.store:
                store.put(key)

    for number, (now, picture) in enumerate(zip(times.tolist(), asked.tolist(), strict=True)):
        finish_until(now)
        if number == join_at:
            for i in range(scenario.num_replicas // 10):
                replicas[f"late-{i}"] = Replica(Recent(scenario.pool))
                loads[f"late-{i}"] = 0
        key = f"picture-{picture}"
        if store.use(key):
            continue
        name = route(key, loads)
        replica = replicas[name]
        loads[name] += 1
        if key in replica.running:
            done, encoding = replica.running[key], False
        elif replica.pool.use(key):
            done, encoding = now, False
        else:
            done = replica.free_at = max(now, replica.free_at) + scenario.encode_s
            replica.work_s += scenario.encode_s
            replica.running[key] = done
            num_encodes, encoding = num_encodes + 1, True
        waits.append(done - now)
        heapq.heappush(ends, (done, name, key, encoding))

    work = np.array([replica.work_s for replica in replicas.values()])
    return Outcome(
        hit_rate=1 - num_encodes / scenario.num_requests,
        num_encodes=num_encodes,
        num_distinct=len(np.unique(asked)),
        imbalance=float(work.max() / work.mean()),
        wait_p99_s=float(np.quantile(waits, 0.99)),
    )


def scenarios(num_replicas: int, num_requests: int) -> list[Scenario]:
    """A store for every picture, for a tenth of them, none; a burst on few pictures; replicas that join."""
    catalogue = num_requests
    encode_s = 0.5
    rate = num_replicas / encode_s  # all would be busy, if nothing were ever held
    plain = Scenario("no store", num_replicas, num_requests, catalogue, 1.0, rate, encode_s, pool=64, store=0)
    return [
        replace(plain, name="store holds all", store=catalogue),
        replace(plain, name="store holds 2%", store=catalogue // 50),
        plain,
        replace(plain, name="no store, burst", exponent=1.4),
        replace(plain, name="no store, 10% join", joins_at=0.5),
    ]


def rows(chosen: Sequence[Scenario]) -> list[list[str]]:
    """Two for each scenario: at random, then by affinity."""
    found = []
    for scenario in chosen:
        base = run(scenario, at_random(1))
        for name, outcome in (("random", base), ("affinity", run(scenario, by_affinity))):
            found.append(
                [
                    scenario.name,
                    name,
                    f"{outcome.hit_rate:.1%}",
                    f"{outcome.num_encodes:,}",
                    f"{outcome.num_encodes / base.num_encodes:.2f}",
                    f"{outcome.num_encodes / outcome.num_distinct:.2f}",
                    f"{outcome.imbalance:.2f}",
                    f"{outcome.wait_p99_s:.2f}",
                ]
            )
    return found


def main() -> None:
    """Simulate, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=300)
    parser.add_argument("--requests", type=int, default=60_000)
    asked = parser.parse_args()
    chosen = scenarios(asked.replicas, asked.requests)
    first = chosen[0]
    header = (
        "scenario",
        "routing",
        "hit rate",
        "encodings",
        "vs random",
        "per picture",
        "imbalance",
        "p99 s",
    )
    text = (
        f"{machine()}\n{first.num_replicas} replicas, {first.num_requests:,} requests at {first.rate:g} a "
        f"second, {first.catalogue:,} pictures, {first.encode_s:g} s an encoding, {first.pool} pictures in "
        "each pool; a burst is Zipf's exponent 1.4, else it is 1\n\n"
        f"{table(header, rows(chosen))}\n"
    )
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fleet.txt").write_text(text)


if __name__ == "__main__":
    main()
