"""Fuzzing of the picture path: whatever the bytes, it answers as Pillow and the processor do, or refuses."""

from __future__ import annotations

import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from epd.models.checkpoint import Checkpoint
from epd.models.errors import InvalidItem
from epd.models.images import ImagePreprocessor
from tests.fuzzing import fuzz
from tests.models.test_picture_kinds import ANIMATED, KINDS, assert_as_reference, reference

pytestmark = pytest.mark.long

MAX_PIXELS = 200_000
FILES = [data for files in KINDS.values() for data in files] + [ANIMATED]
PILLOWS_ERRORS = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, RuntimeError, struct.error),
    *(zlib.error, Image.DecompressionBombError),
)
# Refusals that are ours alone.
LIMITS = ("over the limit", "more pixels", "aspect ratio", "known format")


def test_any_damage_to_any_picture(sharded: Checkpoint, processor: Any, tmp_path: Path) -> None:
    """What is taken has bitwise the reference's patches, and the grid that its header promised; what is not,
    the reference cannot read either.
    """
    images = ImagePreprocessor(sharded, max_pixels=MAX_PIXELS)

    def check(data: bytes) -> bool:
        try:
            images.patches(data)
        except InvalidItem as refusal:
            if data and not any(words in str(refusal) for words in LIMITS):
                with pytest.raises(PILLOWS_ERRORS):
                    reference(data)
            return False
        assert_as_reference(images, processor, data)
        return True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on broken metadata
        fuzz(FILES, check, tmp_path)
