"""Checkpoints in the file format of Qwen3-VL-Embedding, of any shape, with random weights.

Written: config.json, model.safetensors (or shards and their index), tokenizer.json,
tokenizer_config.json, vocab.json, merges.txt, chat_template.jinja, chat_template.json,
preprocessor_config.json and video_preprocessor_config.json. Nothing is downloaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from epd.demo.shapes import CLASSES, TEMPLATES
from epd.demo.tokenizer_format import CHAT_TEMPLATE, write_tokenizer

_INSTRUCTION = "Represent the user's input."
_ROWS_MULTIPLE = 64
_TOKEN_IDS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def default_corpus() -> list[str]:
    """Text that every demo tokenizer should spell in few tokens: prompts, and captions of all classes."""
    captions = [
        template.format(colour=what.colour, shape=what.shape) for what in CLASSES for template in TEMPLATES
    ]
    prompts = [f"system\n{_INSTRUCTION}\nuser\n{words}\nassistant\n" for words in captions]
    return prompts + ["Retrieve images or text relevant to the user's query."] * 20


def write_checkpoint(
    folder: Path,
    *,
    vision: Mapping[str, object] | None = None,
    text: Mapping[str, object] | None = None,
    vocab_size: int = 1024,
    corpus: Iterable[str] | None = None,
    append_end_of_text: bool = True,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int | None = None,
    tie_word_embeddings: bool = True,
    min_pixels: int = 4 * 32 * 32,
    max_pixels: int = 1800 * 32 * 32,
    image_mean: float = 0.5,
    image_std: float = 0.5,
    image_processor: str = "Qwen2VLImageProcessorFast",
    seed: int = 0,
) -> Path:
    """Write a Qwen3-VL-Embedding checkpoint with random weights into `folder` (made if missing); returns it.

    `vision` and `text` override single settings of the two configurations: depths, widths, heads (fewer
    `num_key_value_heads` than `num_attention_heads` is grouped-query attention),
    `deepstack_visual_indexes`, `patch_size`, ... Defaults: 4 vision layers of width 64, deepstack after
    layers 1 and 2; 4 text layers of width 64 with 4 heads of 32 over 2 key-value heads. The vision
    tower's output width follows `text["hidden_size"]`.
    `vocab_size`: tokens of the tokenizer, at most (the corpus may give fewer); the embedding table has
    that many rows, rounded up to 64, unless `text["vocab_size"]` asks for more.
    `corpus`: what the tokenizer is trained on. `append_end_of_text`: the tokenizer appends
    `<|endoftext|>`. `shard_bytes`: largest shard, or one file when None.
    Norms, biases and embeddings are far from their neutral values, so that a tensor left out shows.
    Raises ValueError for settings that do not fit together.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text_settings = _text_settings(text or {})
    tokenizer = write_tokenizer(
        folder,
        default_corpus() if corpus is None else corpus,
        vocab_size=vocab_size,
        append_end_of_text=append_end_of_text,
        max_tokens=text_settings["max_position_embeddings"],
    )
    text_settings.setdefault("vocab_size", math.ceil(len(tokenizer) / _ROWS_MULTIPLE) * _ROWS_MULTIPLE)
    if text_settings["vocab_size"] < len(tokenizer):
        raise ValueError(f"text vocab_size {text_settings['vocab_size']} is below {len(tokenizer)} tokens")
    vision_settings = _vision_settings(vision or {}, out_hidden_size=text_settings["hidden_size"])
    config = Qwen3VLConfig(
        vision_config=vision_settings,
        text_config=text_settings,
        tie_word_embeddings=tie_word_embeddings,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in _TOKEN_IDS.items()},
    )
    model = Qwen3VLForConditionalGeneration(config).to(dtype)
    _randomise(model, seed)
    save_weights(folder, model, shard_bytes)
    _write_processors(
        folder,
        vision_settings,
        pixels=(min_pixels, max_pixels),
        mean_std=(image_mean, image_std),
        image_processor=image_processor,
    )
    return folder


def save_weights(
    folder: Path, model: Qwen3VLForConditionalGeneration, shard_bytes: int | None = None
) -> None:
    """Write config.json and the weights of `model` under their published names, without a tied `lm_head`."""
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = model.dtype
    config.save_pretrained(folder)
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    total = sum(tensor.nbytes for tensor in tensors.values())
    save_torch_state_dict(tensors, folder, max_shard_size=shard_bytes or total + 1)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # written for the owner alone; a checkpoint is for everyone


def _text_settings(overrides: Mapping[str, object]) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 32768,
        **overrides,
    }
    heads, shared = settings["num_attention_heads"], settings["num_key_value_heads"]
    if heads % shared:
        raise ValueError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {shared}")
    half = settings["head_dim"] // 2
    side = half * 5 // 16  # the published split: 24, 20 and 20 of 64 frequencies
    rope = {
        "rope_type": "default",
        "rope_theta": 5_000_000.0,
        "mrope_section": [half - 2 * side, side, side],
        "mrope_interleaved": True,
    }
    settings.setdefault("rope_parameters", rope)
    return settings


def _vision_settings(overrides: Mapping[str, object], *, out_hidden_size: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [1, 2],
        **overrides,
        "out_hidden_size": out_hidden_size,
    }
    positions, depth = settings["num_position_embeddings"], settings["depth"]
    if math.isqrt(positions) ** 2 != positions:
        raise ValueError(f"num_position_embeddings {positions} is not a square")
    if any(not 0 <= layer < depth for layer in settings["deepstack_visual_indexes"]):
        raise ValueError(
            f"deepstack_visual_indexes {settings['deepstack_visual_indexes']} reach beyond depth {depth}"
        )
    return settings


def _randomise(model: Qwen3VLForConditionalGeneration, seed: int) -> None:
    """Values of about unit gain for matrices, of 0.5 for embeddings, and 0.1 around neutral elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                neutral = float("norm" in name and name.endswith("weight"))
                value = neutral + 0.1 * noise
            elif "embed_tokens" in name or "pos_embed" in name:
                value = 0.5 * noise
            else:
                value = noise / math.sqrt(parameter[0].numel())
            parameter.copy_(value)


def _write_processors(
    folder: Path,
    vision: Mapping[str, Any],
    *,
    pixels: tuple[int, int],
    mean_std: tuple[float, float],
    image_processor: str,
) -> None:
    mean, std = mean_std
    shared = {
        "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "image_mean": [mean] * 3,
        "image_std": [std] * 3,
        "processor_class": "Qwen3VLProcessor",
    }
    image = {
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_processor_type": image_processor,
        **shared,
    }
    video = {
        "size": {"shortest_edge": 4096, "longest_edge": 25_165_824},
        "video_processor_type": "Qwen3VLVideoProcessor",
        **shared,
    }
    _write_json(folder / "preprocessor_config.json", image)
    _write_json(folder / "video_preprocessor_config.json", video)
    _write_json(folder / "chat_template.json", {"chat_template": CHAT_TEMPLATE})


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
