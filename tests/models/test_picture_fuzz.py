"""Fuzzing of the picture path: whatever the bytes, it answers as Pillow and the processor do, or refuses."""

from __future__ import annotations

import os
import random
import struct
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from epd.models.checkpoint import Checkpoint
from epd.models.errors import InvalidItem
from epd.models.images import ImagePreprocessor
from tests.memory import resident
from tests.models.test_picture_kinds import ANIMATED, KINDS, assert_as_reference, reference

pytestmark = pytest.mark.long

SECONDS = 60
LONGEST_S = 10.0
"""Of one file: more is a hang."""
MAX_PIXELS = 200_000
MOST_GROWTH = 32 * 2**20
NUMBERS = [0, 1, 2, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]
FILES = [data for files in KINDS.values() for data in files] + [ANIMATED]
PILLOWS_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, RuntimeError, struct.error),
    *(zlib.error, Image.DecompressionBombError),
)
# Refusals that are ours alone.
LIMITS = ("over the limit", "too many pixels", "aspect ratio", "known format")


def damaged(chance: random.Random) -> bytes:
    """A file with a few bytes changed, dropped, doubled, or taken from another."""
    data = bytearray(chance.choice(FILES))
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        # Headers decide most: half of the damage is near the start.
        at = chance.randrange(min(len(data), chance.choice([64, 400, len(data)])) or 1)
        match chance.randrange(7):
            case 0:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                width = chance.choice([1, 2, 4])
                number = chance.choice(NUMBERS) % 256**width
                data[at : at + width] = number.to_bytes(width, chance.choice(["big", "little"]))
            case 2:
                del data[at : at + chance.choice([1, 2, 4, 100])]
            case 3:
                data[at:at] = data[at : at + chance.choice([1, 4, 100])]
            case 4:
                del data[at + 8 :]
            case 5:
                other = chance.choice(FILES)
                start = chance.randrange(len(other))
                data[at : at + 40] = other[start : start + 40]
            case 6:
                data[at : at + 8] = chance.randbytes(8)
    return bytes(data)


def check(images: ImagePreprocessor, processor: Any, data: bytes) -> bool:
    """Whether the picture was taken; it is as the reference makes it, or the reference has none either."""
    try:
        images.patches(data)
    except InvalidItem as refusal:
        if not any(words in str(refusal) for words in LIMITS) and data:
            with pytest.raises(PILLOWS_ERRORS):
                reference(data)
        return False
    assert_as_reference(images, processor, data)
    return True


def test_any_damage_to_any_picture(sharded: Checkpoint, tmp_path: Path) -> None:
    """For a minute: no crash, no hang, no growth, no header that promises other patches than the pixels give.

    EPD_FUZZ_SEED repeats a run; the file that ended it is kept.
    """
    seed = int(os.environ.get("EPD_FUZZ_SEED") or time.time())
    print(f"EPD_FUZZ_SEED={seed}")
    images = ImagePreprocessor(sharded, max_pixels=MAX_PIXELS)
    processor = Qwen2VLImageProcessorPil.from_pretrained(sharded.folder)
    case = tmp_path / "case"
    taken = number = level = 0
    end = time.monotonic() + SECONDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on broken metadata
        while (start := time.monotonic()) < end:
            data = damaged(random.Random(f"{seed} {number}"))
            case.write_bytes(data)
            taken += check(images, processor, data)
            assert time.monotonic() - start < LONGEST_S, f"number {number} of seed {seed}: {case}"
            number += 1
            if number == 500:
                level = resident()
    print(f"{number} files, {taken} of them pictures")
    assert number > 1000
    assert 0 < taken < number
    assert resident() - level < MOST_GROWTH
