"""What the checkpoint's own image processor does to a picture, as plain values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from epd.cache.types import MediaGrid
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem


class PixelBounds(NamedTuple):
    """Least and most pixels of a picture once it is resized."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Settings of Qwen2VLImageProcessor that change pixels. Sizes are pixels, `resample` is Pillow's number.

    A picture is resized to at least `min_pixels` and at most `max_pixels`, both sides multiples of
    `patch_size * merge_size`.
    """

    min_pixels: int
    max_pixels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    resample: int
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> ImageSettings:
        """Raises CheckpointError when the processor is of another kind, does not resize, or contradicts the
        model's own configuration.
        """
        processor = load_processor(checkpoint)
        settings = cls(
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
            patch_size=processor.patch_size,
            merge_size=processor.merge_size,
            temporal_patch_size=processor.temporal_patch_size,
            resample=int(processor.resample),
            do_rescale=processor.do_rescale,
            rescale_factor=processor.rescale_factor,
            do_normalize=processor.do_normalize,
            image_mean=tuple(processor.image_mean),
            image_std=tuple(processor.image_std),
        )
        vision = checkpoint.config.vision_config
        for name, ours, model in (
            ("patch_size", settings.patch_size, vision.patch_size),
            ("merge_size", settings.merge_size, vision.spatial_merge_size),
            ("temporal_patch_size", settings.temporal_patch_size, vision.temporal_patch_size),
        ):
            if ours != model:
                raise CheckpointError(
                    f"{checkpoint.name}: {name} is {ours} for its image processor but {model} for its model"
                )
        return settings

    def fingerprint(self, rules_version: int) -> str:
        """Hash in hex of these settings and of the version of the rules that apply before them."""
        document = json.dumps([rules_version, asdict(self)], sort_keys=True)
        return blake2b(document.encode(), digest_size=16).hexdigest()

    @property
    def bounds(self) -> PixelBounds:
        return PixelBounds(self.min_pixels, self.max_pixels)

    def within(self, bounds: PixelBounds | None) -> ImageSettings:
        """The same settings with other bounds, if there are any."""
        return self if bounds is None else replace(self, **bounds._asdict())

    def fit(self, width: int, height: int) -> MediaGrid:
        """Grid of a picture of that size. Raises InvalidItem when its sides are too unlike."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        if min(width, height) < 1:
            raise InvalidItem(f"a picture of {width} x {height} pixels")
        factor = self.patch_size * self.merge_size
        try:
            high, wide = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        except ValueError as error:
            raise InvalidItem(f"a picture of {width} x {height} pixels: {error}") from None
        return MediaGrid(1, high // self.patch_size, wide // self.patch_size)


def load_processor(checkpoint: Checkpoint) -> Any:
    """transformers' Pillow image processor. Raises CheckpointError when the checkpoint has no such one."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        settings, _ = Qwen2VLImageProcessorPil.get_image_processor_dict(checkpoint.folder)
        processor = Qwen2VLImageProcessorPil(**settings)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read the image processor of {checkpoint.name}: {error}") from error
    kind = str(settings.get("image_processor_type", ""))
    if not kind.startswith("Qwen2VLImageProcessor"):
        raise CheckpointError(
            f"{checkpoint.name} has an image processor of type {kind!r}, not Qwen2VLImageProcessor"
        )
    if not processor.do_resize:
        raise CheckpointError(
            f"{checkpoint.name}: an image processor that does not resize cannot be followed"
        )
    return processor


def byte_table(checkpoint: Checkpoint) -> torch.Tensor:
    """float32 `[3, 256]`: what the checkpoint's own processor makes of each byte of each channel."""
    processor = load_processor(checkpoint)
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return torch.from_numpy(np.array(values, dtype=np.float32, order="C").reshape(3, 256))
