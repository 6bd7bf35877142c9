"""Every kind of picture against Pillow's decoder and the checkpoint's own image processor."""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms, ImageOps

from epd.models.errors import InvalidItem
from epd.models.images import ImagePreprocessor
from tests.models.picture_files import (
    GREY,
    GREY_ALPHA,
    PALETTE,
    RGB,
    RGB_ALPHA,
    before_pixels,
    behind_pixels,
    constant_png,
    exif,
    exif_chunk,
    interlaced_png,
    noise_png,
    raw_profile_chunk,
    xmp,
    xmp_chunk,
    ycck_jpeg,
)
from tests.models.pictures import encoded, picture, png

PAGE = (Path(__file__).parents[2] / "docs" / "pictures.md").read_text()
P = picture(90, 60)
CLEAR = picture(90, 60, mode="RGBA")


def others() -> dict[str, Any]:
    """Options that save two more pictures behind the first; new ones, since Pillow notes on them how."""
    return {"save_all": True, "append_images": [picture(90, 60, 2), picture(90, 60, 3)]}


def grey_levels(kind: str) -> Image.Image:
    """Values far beyond 8 bits, in a type of numpy's."""
    values = np.random.default_rng(0).integers(0, 40_000, (40, 61))
    return Image.fromarray(values.astype(kind))


KINDS: dict[str, list[bytes]] = {
    "JPEG, baseline": [
        *(encoded(P, "JPEG", subsampling=each) for each in ("4:4:4", "4:2:2", "4:2:0")),
        encoded(P, "JPEG", keep_rgb=True),
    ],
    "JPEG, progressive": [encoded(P, "JPEG", progressive=True)],
    "JPEG, grey": [encoded(P.convert("L"), "JPEG")],
    "JPEG, CMYK": [encoded(P.convert("CMYK"), "JPEG", progressive=each) for each in (False, True)],
    "JPEG, YCCK": [ycck_jpeg(P.convert("CMYK"), progressive=each) for each in (False, True)],
    "JPEG, several pictures (MPO)": [encoded(P, "MPO", exif=exif(each), **others()) for each in (1, 6)],
    "PNG, grey of 1 to 8 bits": [noise_png(depth, GREY) for depth in (1, 2, 4, 8)],
    "PNG, grey of 16 bits": [noise_png(16, GREY)],
    "PNG, colours": [noise_png(depth, RGB) for depth in (8, 16)],
    "PNG, palette": [noise_png(depth, PALETTE) for depth in (1, 2, 4, 8)],
    "PNG, alpha": [noise_png(depth, colour) for depth in (8, 16) for colour in (GREY_ALPHA, RGB_ALPHA)],
    "PNG, a transparent colour": [
        *(noise_png(depth, GREY, b"\0\1") for depth in (1, 2, 4, 8, 16)),
        *(noise_png(depth, RGB, b"\0\1\0\1\0\1") for depth in (8, 16)),
        noise_png(8, PALETTE, bytes(range(256))),
    ],
    "PNG, interlaced": [interlaced_png(np.asarray(P))],
    "PNG, animated (APNG)": [encoded(P, "PNG", default_image=each, **others()) for each in (False, True)],
    "WebP": [encoded(image, "WEBP", lossless=each) for image in (P, CLEAR) for each in (False, True)],
    "WebP, animated": [encoded(P, "WEBP", **others())],
    "GIF": [encoded(P.quantize(), "GIF"), encoded(P.quantize(), "GIF", transparency=3)],
    "GIF, animated": [encoded(P.quantize(), "GIF", **others())],
    "TIFF": [
        *(
            encoded(P.convert(mode), "TIFF", compression=how)
            for mode in ("1", "L", "LA", "P", "RGB", "CMYK", "YCbCr")
            for how in (None, "tiff_lzw")
        ),
        *(encoded(grey_levels(kind), "TIFF") for kind in ("<u2", ">u2", "i4", "f4")),
        encoded(CLEAR, "TIFF"),
        encoded(P, "TIFF", compression="jpeg"),
        encoded(P, "TIFF", **others()),
    ],
    "BMP": [encoded(CLEAR.convert(mode), "BMP") for mode in ("1", "L", "P", "RGB", "RGBA")],
    "JPEG 2000, AVIF": [
        encoded(image, kind) for image in (P, CLEAR, P.convert("L")) for kind in ("JPEG2000", "AVIF")
    ],
}


def reference(data: bytes) -> Image.Image:
    """The picture as the model's reference code sees it: upright, on white, in RGB."""
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    seen = upright.convert("RGBA")
    paper = Image.new("RGB", seen.size, "white")
    paper.paste(seen, mask=seen.getchannel("A"))
    return paper


def assert_as_reference(images: ImagePreprocessor, processor: Any, data: bytes) -> None:
    """Bitwise the processor's pixels of the reference picture, and its grid, also from the header alone."""
    expected = processor(images=[reference(data)], return_tensors="pt")
    header_grid = images.grid(data)
    patches, grid = images.patches(data)
    assert [[grid.t, grid.h, grid.w]] == expected["image_grid_thw"].tolist()
    assert header_grid == grid
    values = images.table[torch.arange(3)[:, None], patches.view(len(patches), 3, -1).long()]
    frames = values[:, :, None].expand(-1, -1, images.settings.temporal_patch_size, -1)
    assert torch.equal(frames.flatten(1), expected["pixel_values"])


def constant(images: ImagePreprocessor, data: bytes) -> int:
    """The value of every byte of a picture of one shade."""
    (value,) = set(images.patches(data)[0].flatten().tolist())
    return int(value)


FILES = [
    pytest.param(data, id=f"{kind} {i}") for kind, files in KINDS.items() for i, data in enumerate(files)
]


@pytest.mark.parametrize("data", FILES)
def test_each_kind_is_as_the_reference(images: ImagePreprocessor, processor: Any, data: bytes) -> None:
    """Patches bitwise equal, and the header's grid is the decoded picture's."""
    assert_as_reference(images, processor, data)


def test_every_kind_has_its_rule() -> None:
    """The table of docs/pictures.md names the kinds that are tested here, and no other."""
    rows = re.findall(r"^\| (.+?) +\| ", PAGE.split("## Kinds")[1].split("\n## ")[0], flags=re.MULTILINE)
    assert rows[2:] == list(KINDS)


@pytest.mark.parametrize(("value", "seen"), [(0, 0), (100, 100), (256, 255), (40_000, 255)])
def test_grey_of_16_bits_is_cut_at_255(images: ImagePreprocessor, value: int, seen: int) -> None:
    """Pillow does not scale it: from 255 on it is white."""
    assert constant(images, constant_png(value, GREY)) == seen


@pytest.mark.parametrize("colour", [RGB, GREY_ALPHA])
def test_other_channels_of_16_bits_keep_their_upper_half(images: ImagePreprocessor, colour: int) -> None:
    """Colours, and grey with alpha, are seen at 8 bits."""
    opaque_white = constant_png(0xFFFF, colour)
    assert constant(images, opaque_white) == 0xFF
    if colour == RGB:
        assert constant(images, constant_png(0x12EF, colour)) == 0x12


def test_interlacing_changes_nothing(images: ImagePreprocessor) -> None:
    """Seven passes or rows from top to bottom: the same pixels."""
    patches, _ = images.patches(interlaced_png(np.asarray(P)))
    assert torch.equal(patches, images.patches(encoded(P))[0])


@pytest.mark.parametrize("default_image", [False, True])
def test_an_animated_png_is_what_plain_viewers_show(images: ImagePreprocessor, default_image: bool) -> None:
    """The picture outside the animation if there is one, else the first frame."""
    patches, _ = images.patches(encoded(P, "PNG", default_image=default_image, **others()))
    assert torch.equal(patches, images.patches(encoded(P))[0])


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_icc_profiles_are_not_applied(images: ImagePreprocessor, processor: Any, file_format: str) -> None:
    """As in the reference, whatever the profile says of the colours."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    data = encoded(P, file_format, icc_profile=profile)
    assert Image.open(BytesIO(data)).info["icc_profile"] == profile
    assert torch.equal(images.patches(data)[0], images.patches(encoded(P, file_format))[0])
    assert_as_reference(images, processor, data)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_avif(images: ImagePreprocessor, processor: Any, orientation: int) -> None:
    """Its own turns and mirrors are read as an orientation."""
    data = encoded(P, "AVIF", exif=exif(orientation))
    assert (images.grid(data).h > images.grid(data).w) == (orientation > 4)
    assert_as_reference(images, processor, data)


ANIMATED = encoded(P, "PNG", **others())


@pytest.mark.parametrize(
    ("data", "turned"),
    [
        (before_pixels(png(90, 60), exif_chunk(6)), True),
        (before_pixels(png(90, 60), xmp_chunk(6)), True),
        (before_pixels(png(90, 60), raw_profile_chunk(6)), True),
        (behind_pixels(png(90, 60), exif_chunk(6)), True),
        (behind_pixels(png(90, 60), xmp_chunk(6)), True),
        (behind_pixels(png(90, 60), raw_profile_chunk(6)), True),
        (behind_pixels(before_pixels(png(90, 60), exif_chunk(3)), exif_chunk(6)), True),
        (behind_pixels(before_pixels(png(90, 60), xmp_chunk(6)), exif_chunk(1)), False),
        (behind_pixels(before_pixels(png(90, 60), exif_chunk(1)), xmp_chunk(6)), False),
        (png(90, 60) + exif_chunk(6), False),
        (before_pixels(ANIMATED, exif_chunk(6)), True),
        (behind_pixels(ANIMATED, exif_chunk(6)), False),
        (encoded(P, "JPEG", xmp=xmp(6)), True),
        (encoded(P, "WEBP", xmp=xmp(6)), True),
        (encoded(P, "TIFF", tiffinfo={700: xmp(6)}), True),
        (encoded(P, "TIFF", tiffinfo={700: xmp(6)}, compression="tiff_lzw"), True),
        (encoded(P, "TIFF", tiffinfo={700: xmp(6), 274: 1}), False),
        (encoded(P, "TIFF", tiffinfo={700: xmp(1), 274: 6}), True),
        (encoded(P, "JPEG", exif=exif(9)), False),
        (encoded(P, "JPEG", exif=exif(0)), False),
    ],
)
def test_where_orientation_stands(
    images: ImagePreprocessor, processor: Any, data: bytes, turned: bool
) -> None:
    """EXIF before XMP, a PNG's last chunk before its first, nothing behind the end or an animation's second
    frame; what is no orientation turns nothing.
    """
    grid = images.grid(data)
    assert (grid.h > grid.w) == turned
    assert_as_reference(images, processor, data)


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 2), (200, 1), (1, 200), (400, 2), (9000, 50), (3, 599), (6000, 4000)]
)
def test_shapes_that_the_processor_takes(
    images: ImagePreprocessor, processor: Any, size: tuple[int, int]
) -> None:
    """One pixel, lines and large pictures are resized as by the processor."""
    assert_as_reference(images, processor, encoded(Image.new("RGB", size, (10, 200, 90)), "PNG"))


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (4001, 20), (20_000, 99)])
def test_shapes_that_the_processor_refuses(
    images: ImagePreprocessor, processor: Any, size: tuple[int, int]
) -> None:
    """What is longer than 200 times its width is refused by both, from the header and from the pixels."""
    data = encoded(Image.new("RGB", size), "PNG")
    with pytest.raises(ValueError, match="aspect ratio"):
        processor(images=[reference(data)])
    for read in (images.grid, images.patches):
        with pytest.raises(InvalidItem, match="aspect ratio"):
            read(data)
