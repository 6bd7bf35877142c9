"""A small tokenizer in the files of Qwen3-VL-Embedding: byte-level BPE, special tokens, chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

# In the order of the published vocabulary, where they follow the byte pairs.
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NUM_BYTES = 256  # the alphabet of a byte-level tokenizer

# System, then the user's parts in the order given, then the generation prompt.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
            {%- elif part.type == 'video' or 'video' in part -%}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def write_tokenizer(
    folder: Path, corpus: Iterable[str], *, vocab_size: int, append_end_of_text: bool, max_tokens: int
) -> Qwen2Tokenizer:
    """Train a tokenizer on `corpus` and write its files, chat template included, into `folder`; returns it.

    `vocab_size` counts the bytes (256), the merges and the 14 special tokens; a small corpus may
    give fewer merges. `append_end_of_text`: the post-processor appends `<|endoftext|>` to what is
    tokenised with `add_special_tokens=True`. `max_tokens` is the tokenizer's `model_max_length`.
    Raises ValueError when `vocab_size` cannot hold the bytes and the special tokens.
    """
    least = NUM_BYTES + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ValueError(f"vocab_size {vocab_size} is below {least}: all bytes and the special tokens")
    vocab, merges = _train_byte_pairs(corpus, vocab_size - len(SPECIAL_TOKENS))
    tokenizer = Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token=None,  # named below: naming it here would put it first in the vocabulary
        pad_token="<|endoftext|>",
        model_max_length=max_tokens,
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS], special_tokens=True
    )
    tokenizer.eos_token = "<|im_end|>"
    if append_end_of_text:
        end = ("<|endoftext|>", tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <|endoftext|>", pair="$A <|endoftext|> $B:1 <|endoftext|>:1", special_tokens=[end]
        )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    # The two files of the older format, which published checkpoints still carry.
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges), encoding="utf-8"
    )
    return tokenizer


def _pre_tokenizer() -> PreTokenizer:
    """Qwen2's splitting of text into words and its mapping of bytes to characters."""
    return PreTokenizers(
        [
            Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _train_byte_pairs(corpus: Iterable[str], size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    trained = Tokenizer(BPE())
    trained.normalizer = NFC()
    trained.pre_tokenizer = _pre_tokenizer()
    trained.decoder = ByteLevelDecoder()
    trained.train_from_iterator(
        corpus,
        BpeTrainer(
            vocab_size=size,
            special_tokens=[],
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]
