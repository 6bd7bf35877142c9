"""Small files that promise much: refused from their headers, with flat memory."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from functools import partial

import pytest
from PIL import Image

from epd.models.errors import InvalidItem
from epd.models.images import ImagePreprocessor
from tests.memory import peak_growth
from tests.models.picture_files import GREY, RGB, before_pixels, behind_pixels, chunk, png_file
from tests.models.pictures import encoded, picture, png

MIB = 2**20
FLAT = 4 * MIB
SIDE = 12_000  # 144 million pixels: over the limit, and not over what Pillow itself refuses


def patched(data: bytes, at: int, values: bytes) -> bytes:
    return data[:at] + values + data[at + len(values) :]


def png_bomb() -> bytes:
    """A whole file: 130 MB of zeros, compressed a thousandfold."""
    return png_file(SIDE, SIDE, 8, GREY, bytes((SIDE + 1) * SIDE))


def gif_bomb() -> bytes:
    return patched(encoded(picture(8, 8).quantize(), "GIF"), 6, struct.pack("<HH", SIDE, SIDE))


def bmp_bomb() -> bytes:
    return patched(encoded(picture(8, 8), "BMP"), 18, struct.pack("<ii", SIDE, SIDE))


def jpeg_bomb() -> bytes:
    data = encoded(picture(8, 8), "JPEG")
    return patched(data, data.index(b"\xff\xc0") + 5, struct.pack(">HH", SIDE, SIDE))


def jpeg2000_bomb() -> bytes:
    data = encoded(picture(8, 8), "JPEG2000")
    return patched(data, data.index(b"ihdr") + 4, struct.pack(">II", SIDE, SIDE))


def tiff_bomb() -> bytes:
    """Both sides overwritten: an entry of TIFF 6.0's directory is tag, type, count and value."""
    data = encoded(picture(8, 8), "TIFF")
    start = struct.unpack_from("<I", data, 4)[0]
    for i in range(struct.unpack_from("<H", data, start)[0]):
        entry = start + 2 + 12 * i
        if struct.unpack_from("<H", data, entry)[0] in (256, 257):
            data = patched(data, entry + 2, struct.pack("<HII", 4, 1, SIDE))
    return data


def webp_bomb() -> bytes:
    """Lossless, of one colour: a few dozen bytes."""
    return encoded(Image.new("RGB", (SIDE, SIDE)), "WEBP", lossless=True, quality=0, method=0)


def text_bomb(kind: bytes) -> bytes:
    """A chunk whose text is a thousand times its size."""
    return chunk(kind, b"a\0\0" + zlib.compress(bytes(64 * MIB)))


BOMBS: dict[str, Callable[[], bytes]] = {
    "png": png_bomb,
    "png header": lambda: png_file(60_000, 60_000, 8, RGB, b""),
    "gif": gif_bomb,
    "bmp": bmp_bomb,
    "jpeg": jpeg_bomb,
    "jpeg2000": jpeg2000_bomb,
    "tiff": tiff_bomb,
    "webp": webp_bomb,
    "text before": lambda: before_pixels(png(8, 8), text_bomb(b"zTXt")),
    "text behind": lambda: behind_pixels(png(8, 8), text_bomb(b"zTXt")),
    "profile": lambda: before_pixels(png(8, 8), text_bomb(b"iCCP")),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # as in production
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_flat_memory(images: ImagePreprocessor, name: str) -> None:
    """Neither its header nor its pixels make memory rise, at the edge or at the encoder."""
    data = BOMBS[name]()

    def read(method: Callable[[bytes], object]) -> None:
        with pytest.raises(InvalidItem):
            method(data)

    for method in (images.grid, images.patches):
        read(method)  # what the decoder keeps for good is there
        assert peak_growth(partial(read, method)) < FLAT


def test_decoding_is_seen_by_this_measure(images: ImagePreprocessor) -> None:
    """A picture that is taken costs its pixels: the measure would have seen a bomb's."""
    data = encoded(Image.new("RGB", (8000, 8000)), "PNG")
    assert peak_growth(lambda: images.patches(data)) > 20 * MIB
    assert peak_growth(lambda: images.grid(data)) < FLAT
