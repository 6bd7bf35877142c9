"""Pictures: pixels equal to the Hugging Face processor's, and grids known from headers."""

from __future__ import annotations

import zlib
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from epd.cache.types import MediaGrid
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem
from epd.models.images import ImagePreprocessor
from tests.models.edit import copy_with_json
from tests.models.pictures import encoded, picture, png

ORIENTATION = 0x0112
SIZES = [(1, 1), (28, 28), (30, 200), (200, 30), (333, 257), (640, 480), (1000, 6)]


def pixels(images: ImagePreprocessor, patches: torch.Tensor) -> torch.Tensor:
    """What the vision tower sees: each byte through the table, the frame repeated."""
    channel = torch.arange(3)[:, None]
    frames = images.table[channel, patches.view(len(patches), 3, -1).long()]
    repeated = frames[:, :, None].expand(-1, -1, images.settings.temporal_patch_size, -1)
    return repeated.flatten(1)


def assert_as_processor(images: ImagePreprocessor, processor: Any, data: bytes, seen: Image.Image) -> None:
    """`data` gives bitwise the pixels that the processor makes of `seen`, and a header's grid is theirs."""
    patches, grid = images.patches(data)
    expected = processor(images=[seen], return_tensors="pt")
    assert [grid.t, grid.h, grid.w] == expected["image_grid_thw"][0].tolist()
    assert torch.equal(pixels(images, patches), expected["pixel_values"])
    assert images.grid(data) == grid


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_sizes(images: ImagePreprocessor, processor: Any, width: int, height: int) -> None:
    """Small, large, long and tall pictures are resized as by the processor."""
    image = picture(width, height)
    assert_as_processor(images, processor, encoded(image), image)


def test_photo(images: ImagePreprocessor, processor: Any, photo: bytes) -> None:
    """A photograph."""
    assert_as_processor(images, processor, photo, Image.open(BytesIO(photo)).convert("RGB"))


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000"])
def test_formats(images: ImagePreprocessor, processor: Any, file_format: str) -> None:
    """Every format that Pillow reads by itself."""
    data = encoded(picture(90, 60), file_format)
    assert_as_processor(images, processor, data, Image.open(BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize(
    ("mode", "file_format"), [("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("CMYK", "JPEG")]
)
def test_colour_modes(images: ImagePreprocessor, processor: Any, mode: str, file_format: str) -> None:
    """Grey, bilevel, palette and CMYK pictures are seen in RGB."""
    data = encoded(picture(90, 60, mode=mode), file_format)
    assert_as_processor(images, processor, data, Image.open(BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(images: ImagePreprocessor, processor: Any, file_format: str, orientation: int) -> None:
    """EXIF orientation is applied, and swaps height and width of the grid where it turns the picture."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encoded(picture(120, 60), file_format, exif=exif)
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    assert (upright.height > upright.width) == (orientation > 4)
    assert_as_processor(images, processor, data, upright)


def test_orientation_behind_the_pixels_of_a_png(images: ImagePreprocessor, processor: Any) -> None:
    """An eXIf chunk after the image data counts too, also for the grid."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = encoded(picture(120, 60), exif=exif)
    start = data.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(data[start : start + 4], "big")
    moved = data[:start] + data[end:-12] + data[start:end] + data[-12:]
    upright = ImageOps.exif_transpose(Image.open(BytesIO(moved)))
    assert upright.height > upright.width
    assert_as_processor(images, processor, moved, upright.convert("RGB"))


def test_alpha_is_composited_on_white(images: ImagePreprocessor) -> None:
    """Where a picture is transparent it is white, whatever its hidden colour."""
    clear = Image.new("RGBA", (56, 56), (200, 10, 10, 0))
    patches, _ = images.patches(encoded(clear))
    assert (patches == 255).all()
    half = Image.new("RGBA", (56, 56), (0, 0, 0, 128))
    patches, _ = images.patches(encoded(half))
    assert set(patches.flatten().tolist()) == {127}


@pytest.mark.parametrize("mode", ["LA", "P", "RGB", "L"])
def test_every_kind_of_transparency(images: ImagePreprocessor, mode: str) -> None:
    """Grey with alpha, a transparent palette entry, and a transparent colour become white."""
    if mode == "LA":
        data = encoded(Image.new("LA", (56, 56), (0, 0)))
    else:
        data = encoded(Image.new(mode, (56, 56)), transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert Image.open(BytesIO(data)).has_transparency_data
    assert (images.patches(data)[0] == 255).all()


def test_the_first_frame_of_an_animation_counts(images: ImagePreprocessor, processor: Any) -> None:
    """Later frames are not looked at."""
    first = picture(60, 60, 1).quantize()
    data = encoded(first, "GIF", save_all=True, append_images=[picture(60, 60, 2).quantize()])
    assert_as_processor(images, processor, data, Image.open(BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("data", [b"", b"no picture", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_what_is_no_picture_is_invalid(images: ImagePreprocessor, data: bytes) -> None:
    """Neither a grid nor patches; PostScript, which would run another program, is not read at all."""
    for read in (images.grid, images.patches):
        with pytest.raises(InvalidItem):
            read(data)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_picture_is_invalid(images: ImagePreprocessor, file_format: str) -> None:
    """Half a file may have a header, but no patches."""
    data = encoded(picture(200, 150), file_format)
    with pytest.raises(InvalidItem):
        images.patches(data[: len(data) // 2])


def test_a_corrupt_picture_is_invalid(images: ImagePreprocessor) -> None:
    """Broken compressed data is found, and the error holds none of it."""
    data = bytearray(png(100, 100))
    secret = b"SECRET-SECRET-SECRET"
    middle = data.index(b"IDAT") + 40
    data[middle : middle + len(secret)] = secret
    with pytest.raises(InvalidItem) as caught:
        images.patches(bytes(data))
    assert "SECRET" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_an_absurd_shape_is_invalid(images: ImagePreprocessor) -> None:
    """The image processor's own limit on the ratio of the sides."""
    with pytest.raises(InvalidItem, match="aspect ratio"):
        images.grid(png(1000, 4))


def test_a_bomb_is_refused_from_its_header(sharded: Checkpoint) -> None:
    """More pixels than the limit: refused without decoding, and the limit is this object's alone."""
    strict = ImagePreprocessor(sharded, max_pixels=99 * 100)
    data = png(100, 100)
    cut = data[: data.index(b"IDAT") + 8]
    for read in (strict.grid, strict.patches):
        with pytest.raises(InvalidItem, match="100 x 100 pixels, over the limit of 9900"):
            read(cut)
    assert ImagePreprocessor(sharded).grid(data).num_patches > 0


def test_pillows_own_bomb_limit_is_invalid(images: ImagePreprocessor) -> None:
    """A header that promises gigapixels is the caller's mistake."""
    huge = bytearray(png(8, 8))
    huge[16:24] = (60_000).to_bytes(4, "big") * 2
    huge[29:33] = zlib.crc32(bytes(huge[12:29])).to_bytes(4, "big")
    with pytest.raises(InvalidItem, match="pixels"):
        images.grid(bytes(huge))


def set_value(name: str, value: object, document: dict[str, object]) -> None:
    document[name] = value


def test_fingerprint_covers_what_changes_pixels(sharded_folder: Path, tmp_path: Path) -> None:
    """Equal for equal settings; another one for every single setting that changes pixels."""
    changes: dict[str, Any] = {
        "size": {"shortest_edge": 2352, "longest_edge": 235201},
        "image_mean": [0.5, 0.5, 0.4],
        "image_std": [0.5, 0.5, 0.4],
        "resample": 2,
        "rescale_factor": 1 / 256,
        "do_normalize": False,
        "do_rescale": False,
    }
    prints = [ImagePreprocessor(Checkpoint.open(sharded_folder)).fingerprint for _ in range(2)]
    assert prints[0] == prints[1]
    for name, value in changes.items():
        folder = copy_with_json(
            sharded_folder,
            tmp_path / name,
            "preprocessor_config.json",
            partial(set_value, name, value),
        )
        prints.append(ImagePreprocessor(Checkpoint.open(folder)).fingerprint)
    assert len(set(prints)) == 1 + len(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 16}, "patch_size is 16 for its image processor but 14 for its model"),
        ({"merge_size": 1}, "merge_size is 1"),
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
        ({"do_resize": False}, "resize"),
    ],
)
def test_a_processor_that_does_not_fit_is_refused(
    sharded_folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """Another kind of processor, or one that contradicts the model, is a CheckpointError."""
    folder = copy_with_json(
        sharded_folder, tmp_path, "preprocessor_config.json", lambda document: document.update(change)
    )
    with pytest.raises(CheckpointError, match=message):
        ImagePreprocessor(Checkpoint.open(folder))


def test_a_missing_processor_is_refused(sharded_folder: Path, tmp_path: Path) -> None:
    """Without preprocessor_config.json there are no pictures."""
    folder = copy_with_json(sharded_folder, tmp_path, "preprocessor_config.json", lambda document: None)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="image processor"):
        ImagePreprocessor(Checkpoint.open(folder))


def test_other_normalisation(sharded_folder: Path, tmp_path: Path) -> None:
    """Settings that differ by channel give bitwise the processor's pixels."""
    folder = copy_with_json(
        sharded_folder,
        tmp_path,
        "preprocessor_config.json",
        lambda document: document.update(image_mean=[0.48, 0.45, 0.4], image_std=[0.26, 0.27, 0.3]),
    )
    image = picture(77, 99)
    assert_as_processor(
        ImagePreprocessor(Checkpoint.open(folder)),
        Qwen2VLImageProcessorPil.from_pretrained(folder),
        encoded(image),
        image,
    )


def test_patches_are_bytes_of_their_own(images: ImagePreprocessor) -> None:
    """uint8, contiguous, one frame of 3 x 14 x 14, as many as the grid says."""
    patches, grid = images.patches(png(56, 84))
    assert grid == MediaGrid(1, 6, 4)
    assert patches.shape == (24, 588)
    assert patches.dtype == torch.uint8
    assert patches.is_contiguous()
