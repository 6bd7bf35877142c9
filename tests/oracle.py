"""What an item's vector is, by transformers alone: nothing here uses the code under test.

Token ids and pixels come from the checkpoint's chat template and Hugging Face's own processor, hidden states
from transformers' plain forward of the whole model, one item at a time.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from transformers import AutoTokenizer, ProcessorMixin, Qwen3VLForConditionalGeneration, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

DEFAULT_INSTRUCTION = "Represent the user's input."
COSINE_GATE = 0.99999
LARGEST_DIFFERENCE = 1e-5

Vector = npt.NDArray[np.float32]


class Oracle:
    """`Oracle(folder).embed({"parts": ["a text", picture], "instruction": None})` is the true vector."""

    def __init__(self, folder: Path) -> None:
        model, info = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
        assert not any(info.values()), info
        self.model = model.model.eval()
        self.processor = _ImageTextProcessor.load(folder)

    def inputs(self, item: Mapping[str, Any]) -> Any:
        """Token ids, pixels and grids of one item, as the processor makes them."""
        content: list[dict[str, Any]] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in item["parts"]
        ]
        system = [{"type": "text", "text": _instruction(item.get("instruction"))}]
        messages = [{"role": "system", "content": system}, {"role": "user", "content": content}]
        text = self.processor.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        images = [_upright(part) for part in item["parts"] if not isinstance(part, str)]
        return self.processor(text=[text], images=images or None, return_tensors="pt")

    def hidden(self, item: Mapping[str, Any]) -> torch.Tensor:
        """Last hidden states `[T, hidden]` of one item."""
        with torch.inference_mode():
            out = self.model(**self.inputs(item), use_cache=False)
        states: torch.Tensor = out.last_hidden_state[0]
        return states

    def embed(self, item: Mapping[str, Any], dimensions: int | None = None) -> Vector:
        """Vector of one item: last token, cut to `dimensions`, unit length."""
        last = self.hidden(item)[-1].float().numpy()[:dimensions]
        vector: Vector = last / np.linalg.norm(last)
        return vector


def cosine(one: Vector, other: Vector) -> float:
    """Cosine of the angle between two vectors."""
    a, b = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def assert_same(vector: Vector, truth: Vector) -> None:
    """The gate: cosine at least 0.99999, and no value off by more than 1e-5."""
    assert vector.shape == truth.shape
    assert cosine(vector, truth) >= COSINE_GATE
    assert float(np.abs(vector - truth).max()) <= LARGEST_DIFFERENCE


class _ImageTextProcessor(Qwen3VLProcessor):  # type: ignore[misc]
    """transformers' processor without its video half, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
        for name, token in (
            ("image", "<|image_pad|>"),
            ("video", "<|video_pad|>"),
            ("vision_start", "<|vision_start|>"),
            ("vision_end", "<|vision_end|>"),
        ):
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def load(cls, folder: Path) -> _ImageTextProcessor:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        return cls(images, tokenizer, chat_template=tokenizer.chat_template)


def _instruction(text: str | None) -> str:
    text = (text or "").strip()
    if not text:
        return DEFAULT_INSTRUCTION
    return text if unicodedata.category(text[-1])[0] == "P" else f"{text}."


def _upright(data: bytes) -> Image.Image:
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.split()[3])
        return white
    return image.convert("RGB")
