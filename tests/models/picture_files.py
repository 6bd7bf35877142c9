"""Files of kinds that Pillow reads and does not write: PNGs by their chunks, metadata where it may stand."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt
from PIL import Image

from tests.models.pictures import encoded

ORIENTATION = 0x0112
GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
_CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGB_ALPHA: 4}
# Start and step of each of Adam7's passes: https://www.w3.org/TR/png-3/#8InterlaceMethods.
_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def chunk(kind: bytes, body: bytes) -> bytes:
    """A PNG chunk with its length and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_file(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: bytes,
    extra: bytes = b"",
    *,
    interlaced: bool = False,
) -> bytes:
    """A PNG of filtered `rows`; `extra` chunks stand before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def noise_png(depth: int, colour: int, transparency: bytes = b"") -> bytes:
    """61 x 40 pixels of noise, of `depth` bits a channel; `transparency`: body of a tRNS chunk."""
    rng = np.random.default_rng(depth * 8 + colour)
    extra = b""
    if colour == PALETTE:
        extra += chunk(b"PLTE", rng.integers(0, 256, 3 * 2**depth, np.uint8).tobytes())
    if transparency:
        extra += chunk(b"tRNS", transparency)
    row_bytes = (61 * depth * _CHANNELS[colour] + 7) // 8
    rows = b"".join(b"\0" + rng.integers(0, 256, row_bytes, np.uint8).tobytes() for _ in range(40))
    return png_file(61, 40, depth, colour, rows, extra)


def constant_png(value: int, colour: int) -> bytes:
    """64 x 64 pixels whose every channel is `value`, of 16 bits."""
    row = b"\0" + value.to_bytes(2, "big") * _CHANNELS[colour] * 64
    return png_file(64, 64, 16, colour, row * 64)


def interlaced_png(pixels_HWC: npt.NDArray[np.uint8]) -> bytes:
    """RGB pixels in the seven passes of Adam7."""
    passes = (pixels_HWC[y::down, x::right] for x, y, right, down in _ADAM7)
    rows = b"".join(b"\0" + row.tobytes() for part in passes if part.size for row in part)
    return png_file(pixels_HWC.shape[1], pixels_HWC.shape[0], 8, RGB, rows, interlaced=True)


def before_pixels(png: bytes, *chunks: bytes) -> bytes:
    """The PNG with more chunks before its first IDAT."""
    at = png.index(b"IDAT") - 4
    return png[:at] + b"".join(chunks) + png[at:]


def behind_pixels(png: bytes, *chunks: bytes) -> bytes:
    """The PNG with more chunks before its IEND."""
    return png[:-12] + b"".join(chunks) + png[-12:]


def exif(orientation: int) -> Image.Exif:
    """EXIF of an orientation and nothing else."""
    found = Image.Exif()
    found[ORIENTATION] = orientation
    return found


def exif_chunk(orientation: int) -> bytes:
    """EXIF as PNG's own chunk."""
    return chunk(b"eXIf", exif(orientation).tobytes().removeprefix(b"Exif\0\0"))


def raw_profile_chunk(orientation: int) -> bytes:
    """EXIF as ImageMagick writes it: hex in a text chunk."""
    data = exif(orientation).tobytes()
    return chunk(b"tEXt", b"Raw profile type exif\0\nexif\n%8d\n%s\n" % (len(data), data.hex().encode()))


def xmp(orientation: int) -> bytes:
    """XMP of an orientation and nothing else."""
    return b'<rdf:RDF><rdf:Description tiff:Orientation="%d"/></rdf:RDF>' % orientation


def xmp_chunk(orientation: int) -> bytes:
    """XMP as PNG's text chunk."""
    return chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(orientation))


def ycck_jpeg(cmyk: Image.Image, **options: object) -> bytes:
    """The JPEG of a CMYK picture whose Adobe marker says YCCK: other colours, read the other way."""
    data = bytearray(encoded(cmyk, "JPEG", **options))
    data[data.index(b"Adobe") + 11] = 2
    return bytes(data)
