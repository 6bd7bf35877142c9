"""Fuzzing for a minute, from a seed: damaged files go through a check that must not raise, hang or grow."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.memory import resident

SECONDS = 60
LONGEST_S = 10.0
"""CPU seconds of one file: more is a hang."""
MOST_GROWTH = 32 * 2**20
"""Bytes, over the second half of the time."""
_NUMBERS = [0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]


def fuzz(files: Sequence[bytes], check: Callable[[bytes], bool], folder: Path) -> None:
    """`check` says whether a file was taken; some must be, and some not. EPD_FUZZ_SEED repeats a run; the
    file that ended it is kept in `folder`.
    """
    seed = int(os.environ.get("EPD_FUZZ_SEED") or time.time())
    print(f"EPD_FUZZ_SEED={seed}")
    case = folder / "case"
    taken = number = level = 0
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < SECONDS:
        data = damaged(files, random.Random(f"{seed} {number}"))
        case.write_bytes(data)
        used = time.process_time()
        taken += check(data)
        assert time.process_time() - used < LONGEST_S, f"number {number} of seed {seed}: {case}"
        number += 1
        if not level and elapsed > SECONDS / 2:
            level = resident()
    print(f"{number} files, {taken} of them taken")
    assert 0 < taken < number
    assert resident() - level < MOST_GROWTH


def damaged(files: Sequence[bytes], chance: random.Random) -> bytes:
    """A file with a few bytes changed, dropped, doubled, or taken from another."""
    data = bytearray(chance.choice(files))
    for _ in range(chance.choice([0, 1, 1, 1, 2, 4, 16])):
        # Headers decide most, so much of the damage is near the start.
        at = chance.randrange(min(len(data), chance.choice([64, 400, len(data)])) or 1)
        match chance.randrange(7):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                width = chance.choice([1, 2, 4])
                number = chance.choice(_NUMBERS) % 256**width
                data[at : at + width] = number.to_bytes(width, chance.choice(["big", "little"]))
            case 2:
                del data[at : at + chance.choice([1, 2, 4, 100])]
            case 3:
                data[at:at] = data[at : at + chance.choice([1, 4, 100])]
            case 4:
                del data[at + 8 :]
            case 5:
                other = chance.choice(files)
                start = chance.randrange(len(other))
                data[at : at + 40] = other[start : start + 40]
            case 6:
                data[at : at + 8] = chance.randbytes(8)
    return bytes(data)
