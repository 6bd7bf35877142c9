"""How a picture is to be turned, from its metadata alone."""

from __future__ import annotations

from PIL import Image
from PIL.ExifTags import Base as Tag

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SWAP_SIDES = (5, 6, 7, 8)


def read_orientation(image: Image.Image, data: bytes) -> int:
    """EXIF orientation, 1 to 8, of a picture that was opened from `data` but not decoded.

    1 for TIFF, which Pillow turns by itself as it decodes.
    """
    if image.format == "TIFF":
        return 1
    # PngImageFile.getexif would decode the pixels to reach metadata behind them, so ask the base class.
    orientation = Image.Image.getexif(image).get(Tag.Orientation)
    if orientation is None and image.format == "PNG" and (late := _late_png_exif(data)):
        exif = Image.Exif()
        exif.load(late)
        orientation = exif.get(Tag.Orientation)
    return orientation if orientation in _TURNS else 1


def turned_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """Width and height once `turn` has been applied."""
    width, height = image.size
    return (height, width) if orientation in _SWAP_SIDES else (width, height)


def turn(image: Image.Image, orientation: int) -> Image.Image:
    """The picture the right way up. Decodes it."""
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def _late_png_exif(data: bytes) -> bytes | None:
    """Body of an eXIf chunk, wherever it lies: a walk over chunk headers
    (https://www.w3.org/TR/png-3/#5Chunk-layout: length, type, body, checksum).
    """
    at = len(_PNG_SIGNATURE)
    while at + 8 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind == b"eXIf":
            return data[at + 8 : at + 8 + length]
        at += 12 + length
    return None
