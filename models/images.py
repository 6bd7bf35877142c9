"""Pictures to patches, as the checkpoint's own image processor makes them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError

from epd.cache.types import MediaGrid
from epd.models.checkpoint import Checkpoint
from epd.models.errors import InvalidItem
from epd.models.image_settings import ImageSettings, PixelBounds, byte_table
from epd.models.orientation import read_orientation, turn, turned_size

# Formats that Pillow reads by itself, without an outside program.
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF")
_RULES_VERSION = 2  # raise it when orientation, alpha or RGB are handled differently
# What Pillow's decoders raise on bytes that are not what they claim to be.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    RuntimeError,  # AVIF
    struct.error,
    zlib.error,
)


class ImagePreprocessor:
    """Turns the bytes of a picture into patches, and tells their grid without decoding.

    Rules: EXIF orientation applied, alpha composited on white, RGB, then resized to multiples of
    `patch_size * merge_size` and cut into patches as the checkpoint's image processor does. A patch is
    uint8 `[3 * patch_size**2]`, one frame, channels first; patches of one merged token are neighbours.
    `table` says what the processor makes of each byte. Animated pictures count by their first frame.
    Safe to call from several threads.
    """

    def __init__(self, checkpoint: Checkpoint, max_pixels: int | None = Image.MAX_IMAGE_PIXELS) -> None:
        """`max_pixels`: a picture with more is refused from its header. Pillow itself refuses what is over
        twice its own `MAX_IMAGE_PIXELS`.

        Raises CheckpointError when the checkpoint's image processor is none that this class follows.
        """
        self.settings = ImageSettings.read(checkpoint)
        self.table = byte_table(checkpoint)
        self._max_pixels = max_pixels
        Image.init()
        self._formats = [name for name in _FORMATS if name in Image.OPEN]

    @property
    def fingerprint(self) -> str:
        """Hash in hex of everything that decides the pixels of a given picture."""
        return self.settings.fingerprint(_RULES_VERSION)

    def grid(self, data: bytes, bounds: PixelBounds | None = None) -> MediaGrid:
        """Grid of the picture, from its header. Raises InvalidItem when `data` is no picture."""
        with self._opened(data) as image:
            return self._measure(image, data, bounds)[1]

    def patches(self, data: bytes, bounds: PixelBounds | None = None) -> tuple[torch.Tensor, MediaGrid]:
        """Patches uint8 `[N, 3 * patch_size**2]` on the CPU, N = grid.num_patches, and their grid.

        bounds: instead of the checkpoint's own.
        Raises InvalidItem when `data` is no picture that can be decoded to its end.
        """
        with self._opened(data) as image:
            orientation, grid = self._measure(image, data, bounds)
            promised = turned_size(image, orientation)
            upright = _to_rgb(turn(image, orientation))
        if upright.size != promised:
            raise InvalidItem(f"the picture's sides are {upright.size}, its header promised {promised}")
        size = grid.w * self.settings.patch_size, grid.h * self.settings.patch_size
        if upright.size != size:
            upright = upright.resize(size, Image.Resampling(self.settings.resample))
        return self._cut(np.asarray(upright), grid), grid

    @contextmanager
    def _opened(self, data: bytes) -> Iterator[Image.Image]:
        """The picture, not decoded yet. What Pillow raises on bad bytes becomes InvalidItem, without them."""
        if not data:
            raise InvalidItem("the picture is empty")
        try:
            with Image.open(BytesIO(data), formats=self._formats) as image:
                yield image
        except InvalidItem:
            raise
        except UnidentifiedImageError:
            raise InvalidItem(f"{len(data)} bytes that are no picture of a known format") from None
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise InvalidItem(f"the picture has more pixels than the limit of {self._max_pixels}") from None
        except _BROKEN as error:
            raise InvalidItem(f"the picture cannot be decoded ({type(error).__name__})") from None

    def _measure(self, image: Image.Image, data: bytes, bounds: PixelBounds | None) -> tuple[int, MediaGrid]:
        width, height = image.size
        if self._max_pixels is not None and width * height > self._max_pixels:
            raise InvalidItem(
                f"the picture has {width} x {height} pixels, over the limit of {self._max_pixels}"
            )
        orientation = read_orientation(image, data)
        return orientation, self.settings.within(bounds).fit(*turned_size(image, orientation))

    def _cut(self, pixels_HWC: npt.NDArray[np.uint8], grid: MediaGrid) -> torch.Tensor:
        """Patches in the order of Qwen2VLImageProcessorPil.patchify: merged cells row by row, and in each
        of them its patches row by row.
        """
        p, m = self.settings.patch_size, self.settings.merge_size
        cells = pixels_HWC.reshape(grid.h // m, m, p, grid.w // m, m, p, 3)
        patches = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(grid.num_patches, 3 * p * p)
        return torch.from_numpy(np.ascontiguousarray(patches))


def _to_rgb(image: Image.Image) -> Image.Image:
    """RGB, with alpha composited on white by pasting, as the model's reference code does."""
    image.load()
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    seen = image if image.mode == "RGBA" else image.convert("RGBA")
    paper = Image.new("RGB", seen.size, (255, 255, 255))
    paper.paste(seen, mask=seen.getchannel("A"))
    return paper
