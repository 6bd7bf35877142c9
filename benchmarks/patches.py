"""From a JPEG to the vision tower's first activations: the processor and its convolution, against ours.

    python -m benchmarks.patches [--repeats 5]

Before: Pillow decodes, transformers' image processor (Pillow backend) makes float32 patches of both frames,
Conv3d embeds them. After: `ImagePreprocessor.patches` makes uint8 patches of one frame, `PatchEmbedding`
looks the values up and multiplies. Every row first asserts that both see bitwise the same pixels, on the same
grid. The vision tower's first layer has the sizes of Qwen3-VL-Embedding-2B, with random weights. One thread,
its CPU time. Keeps what it printed in benchmarks/results/patches.txt.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.report import RESULTS, machine, table
from epd.demo.checkpoint_format import write_checkpoint
from epd.models.checkpoint import Checkpoint
from epd.models.images import ImagePreprocessor
from epd.models.patch_embedding import PatchEmbedding

SIZES = ((224, 224), (640, 480), (1280, 960), (4000, 3000))
HIDDEN, PATCH = 1024, 16
"""vision_config.hidden_size and patch_size of Qwen3-VL-Embedding-2B."""
MIN_PIXELS, MAX_PIXELS = 4 * 32 * 32, 1800 * 32 * 32
"""Of a picture: those of the model's reference code."""
HEADER = (
    "JPEG",
    "patches",
    "decode ms",
    "processor ms",
    "ours ms",
    "ratio",
    "processor bytes",
    "our bytes",
    "ratio",
    "Conv3d ms",
    "linear ms",
    "ratio",
    "largest difference",
)


def photo(width: int, height: int) -> bytes:
    """A JPEG of smooth colours and a little noise."""
    rng = np.random.default_rng(width)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = (pixels + rng.integers(-6, 7, pixels.shape)).clip(0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=90)
    return file.getvalue()


def cost(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of CPU: the median of several calls, after one."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        seconds.append(time.thread_time() - start)
    return median(seconds) * 1e3


def decoded(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data)).convert("RGB")


def seen(images: ImagePreprocessor, patches: torch.Tensor) -> torch.Tensor:
    """float32 patches of both frames, as the table says."""
    values = images.table[torch.arange(3)[:, None], patches.view(len(patches), 3, -1).long()]
    return values[:, :, None].expand(-1, -1, images.settings.temporal_patch_size, -1).flatten(1)


@torch.inference_mode()
def measure(
    images: ImagePreprocessor, processor: Any, convolution: nn.Conv3d, size: tuple[int, int], repeats: int
) -> list[str]:
    """One line of the table."""
    data = photo(*size)
    before = processor(images=[decoded(data)], return_tensors="pt")
    patches, grid = images.patches(data)
    assert before["image_grid_thw"].tolist() == [[grid.t, grid.h, grid.w]]
    pixel_values = before["pixel_values"]
    assert torch.equal(seen(images, patches), pixel_values), "the patches are not the processor's"
    embedding = PatchEmbedding(convolution, images.table)
    frames = pixel_values.view(len(patches), 3, images.settings.temporal_patch_size, PATCH, PATCH)
    difference = (convolution(frames).flatten(1) - embedding(patches)).abs().max().item()
    decode = cost(lambda: decoded(data), repeats)
    theirs = cost(lambda: processor(images=[decoded(data)], return_tensors="pt"), repeats)
    ours = cost(lambda: images.patches(data), repeats)
    convolved = cost(lambda: convolution(frames), repeats)
    multiplied = cost(lambda: embedding(patches), repeats)
    return [
        f"{size[0]} x {size[1]}",
        str(len(patches)),
        *(f"{ms:.1f}" for ms in (decode, theirs, ours)),
        f"{theirs / ours:.2f}x",
        f"{pixel_values.nbytes:,}",
        f"{patches.nbytes:,}",
        f"{pixel_values.nbytes / patches.nbytes:.0f}x",
        *(f"{ms:.1f}" for ms in (convolved, multiplied)),
        f"{convolved / multiplied:.2f}x",
        f"{difference:.1e}",
    ]


def report(repeats: int) -> str:
    """The text to print and keep."""
    head = machine(f"torch {torch.__version__}", f"transformers {transformers.__version__}", "one thread")
    with tempfile.TemporaryDirectory() as folder:
        vision = {"patch_size": PATCH}
        written = write_checkpoint(
            Path(folder) / "checkpoint", vision=vision, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
        )
        images = ImagePreprocessor(Checkpoint.open(written))
        processor = Qwen2VLImageProcessorPil.from_pretrained(written)
    torch.manual_seed(0)
    kernel = (images.settings.temporal_patch_size, PATCH, PATCH)
    convolution = nn.Conv3d(3, HIDDEN, kernel, stride=kernel)
    rows = [measure(images, processor, convolution, size, repeats) for size in SIZES]
    units = (
        "CPU ms, median of runs; processor and ours include decoding; ratio: before to after; pixels of both "
        "bitwise equal in every row;\nlargest difference: of the first layer's activations in float32"
    )
    return f"{head}\n{units}\n\n{table(HEADER, rows)}\n"


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = report(options.repeats)
    print(text, end="")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "patches.txt").write_text(text)


if __name__ == "__main__":
    main()
