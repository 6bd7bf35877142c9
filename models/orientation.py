"""How a picture is to be turned, from its metadata alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from io import BytesIO

from PIL import Image
from PIL.ExifTags import Base as Tag

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_METADATA = {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}
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
    """Orientation, 1 to 8, of a picture that was opened from `data` but not decoded: from EXIF, else from
    XMP, as ImageOps.exif_transpose finds it.
    """
    # PngImageFile.getexif would decode the pixels to reach metadata behind them, so ask the base class.
    exif = _late_png_exif(image, data) if image.format == "PNG" else None
    orientation = (Image.Image.getexif(image) if exif is None else exif).get(Tag.Orientation)
    return orientation if orientation in _TURNS else 1


def turned_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """Width and height once `turn` has been applied."""
    width, height = image.size
    # Pillow has swapped the sides of a TIFF already, where a tag of its own (not its XMP) says so.
    if orientation in _SWAP_SIDES and getattr(image, "tag_v2", {}).get(Tag.Orientation) not in _SWAP_SIDES:
        return height, width
    return width, height


def turn(image: Image.Image, orientation: int) -> Image.Image:
    """The picture the right way up. Decodes it; TIFF is turned by Pillow itself as it decodes."""
    if orientation not in _TURNS or image.format == "TIFF":
        return image
    return image.transpose(_TURNS[orientation])


def _late_png_exif(image: Image.Image, data: bytes) -> Image.Exif | None:
    """What Pillow reads from a PNG once it has decoded it, when there is metadata behind the pixels: reads
    the same chunks from a file in which that metadata stands where the pixels were.
    """
    start, late = _split_png(data, animated=getattr(image, "is_animated", False))
    if not late:
        return None
    moved = b"".join(_png_chunk(kind, body) for kind, body in late)
    with Image.open(BytesIO(data[:start] + moved + _png_chunk(b"IDAT", b"")), formats=["PNG"]) as other:
        return Image.Image.getexif(other)


def _split_png(data: bytes, *, animated: bool) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Where the first IDAT chunk starts, and the metadata behind it as far as Pillow reads: to the end, or
    to the next frame of an animation.
    """
    start = 0
    late: list[tuple[bytes, bytes]] = []
    for at, kind, length in _png_chunks(data):
        if kind == b"IEND" or (start and animated and kind == b"fcTL"):
            break
        if kind == b"IDAT" and not start:
            start = at
        elif start and kind in _PNG_METADATA:
            late.append((kind, data[at + 8 : at + 8 + length]))
    return start, late


def _png_chunks(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Place, type and length of each chunk (https://www.w3.org/TR/png-3/#5Chunk-layout: length, type, body,
    checksum).
    """
    at = len(_PNG_SIGNATURE)
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        yield at, data[at + 4 : at + 8], length
        at += 12 + length


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")
