"""How many encoders and embedders a load needs, and how much memory for rows: a calculator.

    python -m benchmarks.sizing                     # rates of the demo checkpoint, measured here
    python -m benchmarks.sizing --encode-rate 60000 --prefill-rate 40000 --row-bytes 16384 \\
        --items 100 --pictures 0.5 --picture-tokens 1024 --text-tokens 64 --catalogue 1000000

Rates are tokens a second of one replica that always has work; docs/sizing.md says how to read them off a
running one, and explains the tables. Keeps what it printed in benchmarks/results/sizing.txt.

Hit rates are those of a least-recently-used cache whose pictures are asked for independently, by Che's
approximation (H. Che, Y. Tung, Z. Wang, "Hierarchical Web Caching Systems", 2002); popularity is Zipf's.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.report import RESULTS, machine, table

Floats = npt.NDArray[np.float64]

_MIN_MEASURE_S = 2.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of one replica that always has work, and bytes of one picture token's row."""

    encode: float
    prefill: float
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """items: a second. pictures: per item, on average. Tokens: of one picture; of an item's text."""

    items: float
    pictures: float
    picture_tokens: int
    text_tokens: int

    @property
    def picture_tokens_per_s(self) -> float:
        return self.items * self.pictures * self.picture_tokens

    @property
    def tokens_per_s(self) -> float:
        """What the language model sees."""
        return self.picture_tokens_per_s + self.items * self.text_tokens


def replicas(load: Load, rates: Rates, hit_rate: float, utilisation: float) -> tuple[float, float]:
    """Encoders and embedders that the load keeps busy for `utilisation` of the time; not rounded."""
    encoders = load.picture_tokens_per_s * (1 - hit_rate) / (rates.encode * utilisation)
    embedders = load.tokens_per_s / (rates.prefill * utilisation)
    return encoders, embedders


def zipf(catalogue: int, exponent: float) -> Floats:
    """Chance of each picture to be the next one asked for, the likeliest first."""
    weights = np.arange(1, catalogue + 1, dtype=np.float64) ** -exponent
    chances: Floats = weights / weights.sum()
    return chances


def lru_hit_rate(chances: Floats, capacity: float) -> float:
    """Of a least-recently-used cache for `capacity` pictures."""
    if capacity >= len(chances):
        return 1.0
    return _hit(chances, _solve(lambda age: _held(chances, age), capacity))


def capacity_for(chances: Floats, hit_rate: float) -> int:
    """The fewest pictures whose cache has this hit rate, below 1."""
    return math.ceil(_held(chances, _solve(lambda age: _hit(chances, age), hit_rate)))


# A picture stays until as many others as the cache holds were asked for: so many requests are its `age`.


def _hit(chances: Floats, age: float) -> float:
    """Chance that the next picture was asked for within the last `age` requests."""
    return float(chances @ -np.expm1(-chances * age))


def _held(chances: Floats, age: float) -> float:
    """Pictures asked for at least once in `age` requests, on average."""
    return float(-np.expm1(-chances * age).sum())


def _solve(grows: Callable[[float], float], target: float) -> float:
    """Where a function that grows from 0 reaches `target`."""
    low, high = 0.0, 1.0
    while grows(high) < target:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) < target else (low, middle)
    return high


def measure() -> Rates:
    """Rates of the demo checkpoint here, on one thread, with nothing around the models' packed forwards."""
    import torch

    from epd.cache.kv.settings import KVSettings
    from epd.demo.shapes import CLASSES, generator, render_png
    from epd.models.checkpoint import Checkpoint
    from epd.models.families import family_of
    from epd.models.images import ImagePreprocessor
    from epd.models.pieces import PrefillSequence
    from epd.models.positions import mrope_positions
    from epd.models.prefill import build_runner
    from epd.models.types import TokenSequence

    torch.set_num_threads(1)
    checkpoint = Checkpoint.open("demo")
    family = family_of(checkpoint)
    layout = family.row_layout(checkpoint, torch.float32)
    assert layout is not None

    tower = family.load_encoder(checkpoint, torch.float32, torch.device("cpu"))
    images = ImagePreprocessor(checkpoint)
    rng = generator("sizing", 0)
    patches, grids = zip(*(images.patches(render_png(what, rng)) for what in CLASSES), strict=True)
    encoded = sum(grid.num_tokens(family.merge_size) for grid in grids)

    config = checkpoint.read_json("config.json")
    assert config is not None
    language_model = family.load_embedder(checkpoint, torch.float32, torch.device("cpu"))
    runner = build_runner(language_model, KVSettings(), config, {})
    tokens = TokenSequence(np.arange(128) % 100 + 1)
    sequences = [PrefillSequence(tokens, mrope_positions(tokens, family.merge_size))] * 32
    return Rates(
        encode=encoded / _seconds(lambda: tower.encode(patches, grids)),
        prefill=len(sequences) * tokens.num_tokens / _seconds(lambda: runner.run(sequences)),
        row_bytes=layout.row_bytes,
    )


def _seconds(work: Callable[[], object]) -> float:
    """CPU time, on this thread, of the fastest of the calls that fit into `_MIN_MEASURE_S`: what the clock
    says where the thread has a core to itself, whatever else runs here. The first call warms up.
    """
    work()
    calls: list[float] = []
    while sum(calls) < _MIN_MEASURE_S:
        started = time.thread_time()
        work()
        calls.append(time.thread_time() - started)
    return min(calls)


def replica_rows(load: Load, rates: Rates, utilisation: float) -> list[list[str]]:
    """Replicas by hit rate."""
    rows = []
    for hit_rate in (0.0, 0.5, 0.8, 0.9, 0.95, 0.99):
        encoders, embedders = replicas(load, rates, hit_rate, utilisation)
        ratio = encoders / embedders
        counts = f"{math.ceil(encoders)} + {math.ceil(embedders)}"
        rows.append([f"{hit_rate:.0%}", f"{encoders:.2f}", f"{embedders:.2f}", f"{ratio:.2f}", counts])
    return rows


def mix_rows(load: Load, rates: Rates) -> list[list[str]]:
    """Encoders for one embedder, by pictures per item and hit rate."""
    rows = []
    for pictures in (0.05, 0.25, 0.5, 1.0, 4.0):
        mixed = replace(load, pictures=pictures)
        ratios = []
        for hit_rate in (0.0, 0.5, 0.9, 0.99):
            encoders, embedders = replicas(mixed, rates, hit_rate, 1)
            ratios.append(f"{encoders / embedders:.3f}")
        rows.append([f"{pictures:g}", *ratios])
    return rows


def memory_rows(chances: Floats, load: Load, rates: Rates) -> list[list[str]]:
    """Memory by hit rate wanted."""
    rows = []
    for hit_rate in (0.5, 0.8, 0.9, 0.95, 0.99):
        pictures = capacity_for(chances, hit_rate)
        size = pictures * load.picture_tokens * rates.row_bytes
        rows.append(
            [f"{hit_rate:.0%}", f"{pictures:,}", f"{pictures / len(chances):.1%}", f"{size / 2**30:,.1f}"]
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encode-rate", type=float, help="tokens a second of one encoder")
    parser.add_argument("--prefill-rate", type=float, help="tokens a second of one embedder")
    parser.add_argument(
        "--row-bytes", type=int, help="hidden size x (1 + deepstack levels) x bytes of a value"
    )
    parser.add_argument("--items", type=float, default=100, help="items a second")
    parser.add_argument("--pictures", type=float, default=0.5, help="pictures per item, on average")
    parser.add_argument("--picture-tokens", type=int, default=256)
    parser.add_argument("--text-tokens", type=int, default=64, help="of an item's text and template")
    parser.add_argument(
        "--utilisation", type=float, default=0.7, help="share of the time that replicas are busy"
    )
    parser.add_argument("--catalogue", type=int, default=1_000_000, help="distinct pictures")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of their popularity")
    return parser.parse_args()


def main() -> None:
    """Compute, print and keep."""
    asked = arguments()
    given = (asked.encode_rate, asked.prefill_rate, asked.row_bytes)
    if None in given and any(given):
        raise SystemExit(
            "give all of --encode-rate, --prefill-rate and --row-bytes, or none to measure them here"
        )
    rates = measure() if None in given else Rates(*given)
    load = Load(asked.items, asked.pictures, asked.picture_tokens, asked.text_tokens)
    chances = zipf(asked.catalogue, asked.zipf)
    source = "given" if None not in given else "measured here, demo checkpoint, one thread"
    header = ("hit rate", "encoders", "embedders", "ratio", "rounded up")
    parts = [
        machine(),
        f"rates ({source}): {rates.encode:,.0f} tokens/s encoded, {rates.prefill:,.0f} prefilled, "
        f"{rates.row_bytes:,} bytes a row\nload: {load.items:g} items/s with {load.pictures:g} pictures of "
        f"{load.picture_tokens} tokens and {load.text_tokens} text tokens each",
        f"replicas busy {asked.utilisation:.0%} of the time, by the share of pictures that need no encoding\n"
        + table(header, replica_rows(load, rates, asked.utilisation)),
        "encoders for one embedder, by pictures per item and hit rate\n"
        + table(("pictures per item", "0%", "50%", "90%", "99%"), mix_rows(load, rates)),
        f"memory for rows, of {asked.catalogue:,} pictures with Zipf exponent {asked.zipf:g}\n"
        + table(("hit rate", "pictures held", "of all", "GiB"), memory_rows(chances, load, rates)),
    ]
    text = "\n\n".join(parts) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sizing.txt").write_text(text)


if __name__ == "__main__":
    main()
