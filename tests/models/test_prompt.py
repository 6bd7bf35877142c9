"""Prompts: tokens equal to the tokenizer's on the whole string, and what users may write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from epd.cache.types import MediaGrid
from epd.demo.checkpoint_format import write_checkpoint
from epd.models.chat_prompt import ChatPrompt, complete_instruction
from epd.models.checkpoint import Checkpoint
from epd.models.errors import CheckpointError, InvalidItem
from epd.models.prompt import from_token_ids
from epd.models.types import MediaSpan
from tests.models.edit import copy_with

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>")
HARD_TEXTS = (
    "plain words",
    "\nstarts with a newline",
    "\n\n  \r\n\tstarts with white space",
    " starts with a space",
    "ends with spaces and newlines  \n\n",
    "\n",
    "   ",
    "苹果是什么颜色的",
    "🍎🍏 emoji first, 👩‍👩‍👧 joined",
    "e\u0301 combining, \u0301first",
    "1234567890 and 3.14",
    "don't I'LL we've",
    "<|not_a_token|> <image> </s>",
    "\u200bzero width\u00a0no-break",
    "العربية עברית",
)


@pytest.fixture(scope="module")
def newlines_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that has learnt tokens of several newlines, as published ones have."""
    corpus = ["user\n\n\ntext\n\n  \nmore\n\n"] * 50
    return write_checkpoint(tmp_path_factory.mktemp("newlines"), corpus=corpus)


@pytest.fixture(scope="module", params=["demo_folder", "sharded_folder", "newlines_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prompt(folder: Path) -> ChatPrompt:
    return ChatPrompt(Checkpoint.open(folder))


def whole(tokenizer: Any, user: str, system: str = "Represent the user's input.") -> list[int]:
    """Ids of the whole template as one string, by the tokenizer itself."""
    text = (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
    return ids


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_is_tokenised_as_within_the_whole_string(prompt: ChatPrompt, tokenizer: Any, text: str) -> None:
    """Byte pairs that merge across the border of template and text come out as in the whole string."""
    assert prompt.render([text]).token_ids.tolist() == whole(tokenizer, text)


# Any text without a special token, which the tokenizer would read as one in the whole string.
ANY_TEXT = st.text(max_size=40).filter(lambda text: "<|" not in text)


@given(text=ANY_TEXT.filter(bool), system=ANY_TEXT)
@settings(max_examples=150, deadline=None)
def test_any_text_is_tokenised_as_within_the_whole_string(
    prompt: ChatPrompt, tokenizer: Any, text: str, system: str
) -> None:
    """The same for arbitrary Unicode in text and instruction."""
    rendered = prompt.render([text], system).token_ids.tolist()
    assert rendered == whole(tokenizer, text, complete_instruction(system))


def test_byte_pairs_do_merge_across_the_border(newlines_folder: Path) -> None:
    """The tests above are worth something: tokenising text apart from its template gives other tokens."""
    tokenizer = AutoTokenizer.from_pretrained(newlines_folder)
    apart = tokenizer("user\n", add_special_tokens=False)["input_ids"]
    apart += tokenizer("\ntext", add_special_tokens=False)["input_ids"]
    assert tokenizer("user\n\ntext", add_special_tokens=False)["input_ids"] != apart


def test_neighbouring_texts_are_tokenised_as_one(prompt: ChatPrompt, tokenizer: Any) -> None:
    """Two text parts in a row give the tokens of their concatenation."""
    assert prompt.render(["a pic", "ture", "\n", "\nof"]).token_ids.tolist() == whole(
        tokenizer, "a picture\n\nof"
    )


def test_the_suffix_comes_from_the_tokenizer(prompt: ChatPrompt, tokenizer: Any) -> None:
    """What the post-processor appends is there, and only then."""
    appended = tokenizer("x")["input_ids"][1:]
    newline = tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
    assert prompt.render(["x"]).token_ids.tolist()[-len(newline + appended) :] == newline + appended


@pytest.mark.parametrize("special", SPECIALS)
def test_special_tokens_in_text_are_literal(prompt: ChatPrompt, tokenizer: Any, special: str) -> None:
    """A user's text or instruction can make no special token: their number is the template's."""
    number = tokenizer.convert_tokens_to_ids(special)
    plain = prompt.render(["see this"], "do").token_ids.tolist().count(number)
    forged = prompt.render([f"see {special} this{special}"], f"do {special}").token_ids
    assert forged.tolist().count(number) == plain
    assert f"see {special} this{special}<|im_end|>" in tokenizer.decode(forged)


def test_media_spans_cover_the_placeholders(prompt: ChatPrompt, tokenizer: Any) -> None:
    """Each picture has its span, in order, on as many placeholders as it has merged tokens."""
    first, second = MediaGrid(1, 4, 6), MediaGrid(1, 2, 2)
    sequence = prompt.render([first, "between", second])
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    (places,) = np.nonzero(sequence.token_ids == pad)
    assert sequence.spans == (
        MediaSpan(int(places[0]), 6, first),
        MediaSpan(int(places[-1]), 1, second),
    )
    assert len(places) == 7


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, "Represent the user's input."),
        ("", "Represent the user's input."),
        ("  \n", "Represent the user's input."),
        ("Find it", "Find it."),
        ("  Find it \n", "Find it."),
        ("Find it.", "Find it."),
        ("Find it!", "Find it!"),
        ("找到它。", "找到它。"),
        ("(this)", "(this)"),
        ("a + ", "a +."),
        ("5 $", "5 $."),
    ],
)
def test_instruction_is_completed(given: str | None, expected: str) -> None:
    """Stripped, and ended with a full stop unless it ends in Unicode punctuation; blank is the default."""
    assert complete_instruction(given) == expected


@pytest.mark.parametrize("parts", [[], [""], ["", ""]])
def test_an_empty_item_is_invalid(prompt: ChatPrompt, parts: list[str]) -> None:
    """No text and no picture: nothing to embed."""
    with pytest.raises(InvalidItem, match="empty"):
        prompt.render(parts)


def test_a_lone_surrogate_is_invalid(prompt: ChatPrompt) -> None:
    """Text that is not valid Unicode is refused without quoting it."""
    with pytest.raises(InvalidItem, match="surrogate") as caught:
        prompt.render(["secret \ud800"])
    assert "secret" not in str(caught.value)


def test_truncation_cuts_the_users_text_only(prompt: ChatPrompt) -> None:
    """From the end of the last text; template, instruction and pictures stay."""
    grid = MediaGrid(1, 4, 4)
    parts: list[str | MediaGrid] = ["one two three four", grid, "five six seven eight nine"]
    full = prompt.render(parts)
    bare = prompt.render([grid])
    for max_tokens in range(bare.num_tokens, full.num_tokens + 1):
        cut = prompt.render(parts, max_tokens=max_tokens)
        assert cut.num_tokens == max_tokens
        assert [span.length for span in cut.spans] == [4]
        assert cut.token_ids[-5:].tolist() == full.token_ids[-5:].tolist()
    last = prompt.render(parts, max_tokens=full.num_tokens - 1)
    assert last.spans == full.spans


def test_truncation_that_cannot_suffice_names_both_lengths(prompt: ChatPrompt) -> None:
    """When pictures and template alone are too long, the error says how long and how long it may be."""
    bare = prompt.render([MediaGrid(1, 4, 4)]).num_tokens
    with pytest.raises(InvalidItem, match=f"{bare} tokens .* limit of {bare - 1}"):
        prompt.render([MediaGrid(1, 4, 4), "text"], max_tokens=bare - 1)


def test_a_tokenizer_without_the_templates_tokens_is_refused(sharded_folder: Path, tmp_path: Path) -> None:
    """A special token that is missing is named."""
    tokenizer = (sharded_folder / "tokenizer.json").read_text(encoding="utf-8")
    copy_with(
        sharded_folder, tmp_path, {"tokenizer.json": tokenizer.replace("<|vision_end|>", "<|vision_fin|>")}
    )
    config = (tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(config.replace("<|vision_end|>", "<|vision_fin|>"))
    with pytest.raises(CheckpointError, match=r"no token <\|vision_end\|>"):
        ChatPrompt(Checkpoint.open(tmp_path))


def test_own_token_ids_pass_as_they_are() -> None:
    """The caller's ids become a sequence of their own, if the token table has them."""
    assert from_token_ids([0, 9, 3], vocab_size=10).token_ids.tolist() == [0, 9, 3]
    for ids in ([], [10], [-1]):
        with pytest.raises(InvalidItem):
            from_token_ids(ids, vocab_size=10)
