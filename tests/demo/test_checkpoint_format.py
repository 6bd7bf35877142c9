"""Checkpoints that `write_checkpoint` writes: complete for transformers, and of the shape asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration, Qwen3VLModel

from epd.demo.checkpoint_format import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every default."""
    return write_checkpoint(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint in shards of at most 200 000 bytes, with its own output matrix."""
    return write_checkpoint(
        tmp_path_factory.mktemp("sharded"),
        vision={"depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
        text={"num_attention_heads": 6, "num_key_value_heads": 3},
        dtype=torch.bfloat16,
        shard_bytes=200_000,
        tie_word_embeddings=False,
        append_end_of_text=False,
    )


def tensor_names(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())


@pytest.mark.parametrize("model_class", [Qwen3VLForConditionalGeneration, Qwen3VLModel])
def test_transformers_finds_every_weight(model_class: type[Qwen3VLModel], folder: Path) -> None:
    """Both of transformers' classes load the folder without a missing or unexpected tensor."""
    _, report = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report


def test_names_are_the_published_ones(folder: Path) -> None:
    """Every tensor is `model.visual.*` or `model.language_model.*`, and a tied output matrix is left out."""
    names = tensor_names(folder / "model.safetensors")
    assert {".".join(name.split(".")[:2]) for name in names} == {"model.visual", "model.language_model"}


def test_shards_cover_the_weights_once(sharded: Path) -> None:
    """The index names for each tensor the one shard that holds it, none over the size asked for."""
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    shards = sorted(sharded.glob("model-*.safetensors"))
    held = [(name, shard.name) for shard in shards for name in tensor_names(shard)]
    assert len(shards) > 1
    assert dict(held) == index["weight_map"]
    assert len(held) == len(index["weight_map"])
    assert all(shard.stat().st_size < 200_000 + 10_000 for shard in shards)  # and a header each


def test_shape_and_dtype_follow_the_arguments(sharded: Path) -> None:
    """Depth, deepstack layers, grouped queries, dtype and the untied output matrix arrive in the model."""
    model, report = Qwen3VLForConditionalGeneration.from_pretrained(sharded, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.bfloat16
    assert len(model.model.visual.blocks) == 3
    assert len(model.model.visual.deepstack_merger_list) == 3
    attention = model.model.language_model.layers[0].self_attn
    assert (attention.q_proj.out_features, attention.k_proj.out_features) == (6 * 32, 3 * 32)
    assert not torch.equal(model.lm_head.weight, model.model.language_model.embed_tokens.weight)


def test_no_tensor_is_neutral(folder: Path) -> None:
    """No tensor is constant, so that a model that leaves one at its default gives other vectors."""
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        constant = [name for name in tensors.keys() if tensors.get_tensor(name).unique().numel() < 4]  # noqa: SIM118
    assert constant == []


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    """Equal seeds write equal bytes, other seeds other weights."""
    first, again, other = (
        (write_checkpoint(tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in [("first", 3), ("again", 3), ("other", 4)]
    )
    assert first == again
    assert first != other


def test_template_renders_text_and_parts_in_order(folder: Path) -> None:
    """String content and lists of parts render in the order given, then the generation prompt."""
    messages = [
        {"role": "system", "content": "Represent the user's input."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "before "},
                {"type": "image", "image": "first.png"},
                {"type": "text", "text": " between "},
                {"type": "image_url", "image_url": {"url": "second.png"}},
            ],
        },
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    body = (
        "<|im_start|>system\nRepresent the user's input.<|im_end|>\n"
        f"<|im_start|>user\nbefore {picture} between {picture}<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tokenize=False) == body
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == body + "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["folder", "sharded"])
def test_end_of_text_is_appended_when_asked_for(name: str, request: pytest.FixtureRequest) -> None:
    """Tokenising with special tokens appends `<|endoftext|>` by default, and nothing when switched off."""
    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(name))
    plain = tokenizer("a red circle", add_special_tokens=False).input_ids
    appended = [tokenizer.convert_tokens_to_ids("<|endoftext|>")] if name == "folder" else []
    assert tokenizer("a red circle").input_ids == plain + appended


def test_special_tokens_are_single_tokens(folder: Path) -> None:
    """Each special token of the configuration is one token that the tokenizer knows under the same number."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for setting, token in [
        ("image_token_id", "<|image_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
    ]:
        assert tokenizer(token, add_special_tokens=False).input_ids == [config[setting]]


def test_image_processor_takes_the_pixel_limits(tmp_path: Path) -> None:
    """transformers' image processor reads the limits and the patch size that were asked for."""
    folder = write_checkpoint(tmp_path, vision={"patch_size": 14}, min_pixels=3136, max_pixels=50_176)
    processor = AutoImageProcessor.from_pretrained(folder)
    assert processor.patch_size == 14
    assert (processor.size["shortest_edge"], processor.size["longest_edge"]) == (3136, 50_176)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": {"num_attention_heads": 3, "num_key_value_heads": 2}}, "num_attention_heads 3 .* 2"),
        ({"vision": {"deepstack_visual_indexes": [4]}}, r"\[4\] .* depth 4"),
        ({"vision": {"num_position_embeddings": 10}}, "10 is not a square"),
        ({"vocab_size": 200}, "vocab_size 200 is below 270"),
        ({"text": {"vocab_size": 64}}, "vocab_size 64 is below"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    arguments: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Settings that cannot work together raise ValueError naming both values."""
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path, **arguments)  # type: ignore[arg-type]
