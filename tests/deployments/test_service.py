"""One request through both stages, with stages that tests can bend."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import pytest

from epd.deployments.errors import DeadlineExceeded, RequestError, StageUnavailable
from epd.deployments.items import ImagePart, Item
from epd.deployments.messages import (
    EmbedReply,
    EncodeReply,
    MediaMessage,
    MediaRef,
    RowsMessage,
    SequenceMessage,
)
from epd.deployments.preparation import PreparedRequest
from epd.deployments.service import EmbeddingService

HIDDEN = 4


class FakePreparer:
    """A picture is its own key, one token; a text is one token of its length."""

    def prepare(self, items: Sequence[Item], salt: str | None = None) -> PreparedRequest:
        media: dict[str, MediaMessage] = {}
        params: dict[str, str] = {}
        sequences = []
        for item in items:
            refs: list[MediaRef] = []
            for part in item.parts:
                if isinstance(part, ImagePart):
                    key = part.data.decode()
                    media.setdefault(key, MediaMessage(key, (1, 2, 2), part.data))
                    params.setdefault(key, part.param)
                    refs.append(MediaRef(key, (1, 2, 2), len(refs), 1))
            text = "".join(part for part in item.parts if isinstance(part, str))
            tokens = np.array([0] * len(refs) + [len(text)], np.int32)
            sequences.append(SequenceMessage(tokens, tuple(refs), salt))
        return PreparedRequest(tuple(sequences), media, params)


class FakeStages:
    """Both stages over one dictionary of published keys.

    lose: keys that the store takes and forgets. unpublished: keys whose rows travel directly.
    evicts: the store is emptied after each question. forgetful: rows that travel are not taken.
    unreadable: keys that fail to decode. hang: the embedder never answers.
    """

    def __init__(self) -> None:
        self.store: set[str] = set()
        self.lose: set[str] = set()
        self.unpublished: set[str] = set()
        self.unreadable: set[str] = set()
        self.evicts = False
        self.forgetful = False
        self.hang = False
        self.encoded: list[str] = []
        self.asked: list[int] = []

    async def encode(self, media: Sequence[MediaMessage]) -> EncodeReply:
        keys = [message.key for message in media]
        self.encoded += keys
        failed = {key: "the picture cannot be read" for key in keys if key in self.unreadable}
        rows = RowsMessage((1, 2, 2), np.zeros((1, 8), np.uint8))
        direct = {message.key: rows for message in media if message.direct or message.key in self.unpublished}
        published = [key for key in keys if key not in failed and key not in direct]
        self.store |= set(published) - self.lose
        return EncodeReply(tuple(published), direct, failed)

    async def embed(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage], dimensions: int | None
    ) -> EmbedReply:
        self.asked.append(len(sequences))
        if self.hang:
            await asyncio.Event().wait()
        have = self.store if self.forgetful else self.store | set(rows)
        missing = {ref.key for s in sequences for ref in s.media} - have
        if self.evicts:
            self.store.clear()
        done = tuple(i for i, s in enumerate(sequences) if not missing & {ref.key for ref in s.media})
        width = dimensions or HIDDEN
        vectors = np.array([[sequences[i].token_ids[-1]] * width for i in done], np.float32)
        return EmbedReply(vectors.reshape(len(done), width), done, tuple(sorted(missing)))


class FakeDirectory:
    """Knows that a store lacks what it lacks; remembers what it is told."""

    def __init__(self, stages: FakeStages) -> None:
        self.stages = stages
        self.known: set[str] = set()

    async def absent(self, keys: Collection[str]) -> list[str]:
        return [key for key in keys if key not in self.known and key not in self.stages.store]

    def remember(self, keys: Iterable[str]) -> None:
        self.known |= set(keys)

    def forget(self, keys: Iterable[str]) -> None:
        self.known -= set(keys)


def make(
    stages: FakeStages, timeout_s: float = 30, directory: FakeDirectory | None = None
) -> EmbeddingService:
    preparer = FakePreparer()
    return EmbeddingService(
        preparer,  # type: ignore[arg-type]
        stages,
        stages,
        hidden_size=HIDDEN,
        request_timeout_s=timeout_s,
        directory=directory,
    )


def text(value: str) -> Item:
    return Item((value,), "input")


def picture(key: str, value: str = "", param: str = "input.image") -> Item:
    return Item((ImagePart(key.encode(), param), value), "input")


async def test_text_alone_asks_the_embedder_once() -> None:
    """Text needs one call of the embedder and none of the encoder."""
    stages = FakeStages()
    embedded = await make(stages).embed([text("a"), text("bb")])
    assert embedded.vectors[:, 0].tolist() == [1, 2]
    assert (stages.asked, stages.encoded, embedded.num_tokens) == ([2], [], 2)


async def test_a_missing_picture_is_encoded_and_only_its_items_are_asked_again() -> None:
    """Items that need nothing are answered by the first call; the rest by the second, in order."""
    stages = FakeStages()
    embedded = await make(stages).embed([text("a"), picture("x", "bb"), text("ccc"), picture("x", "dddd")])
    assert embedded.vectors[:, 0].tolist() == [1, 2, 3, 4]
    assert (stages.asked, stages.encoded) == ([4, 2], ["x"])


async def test_a_known_picture_is_not_encoded() -> None:
    """A picture that the store holds costs one call of the embedder."""
    stages = FakeStages()
    stages.store.add("x")
    await make(stages).embed([picture("x")])
    assert (stages.asked, stages.encoded) == ([1], [])


async def test_rows_that_no_store_takes_travel_directly() -> None:
    """When the store takes nothing the request is answered all the same."""
    stages = FakeStages()
    stages.unpublished = {"x", "y"}
    embedded = await make(stages).embed([picture("x", "a"), picture("y", "bb")])
    assert embedded.vectors[:, 0].tolist() == [1, 2]
    assert stages.asked == [2, 2]


@pytest.mark.parametrize("has_directory", [False, True])
async def test_rows_that_a_store_took_and_lost_travel_directly(has_directory: bool) -> None:
    """A picture that is missing after it was published travels with the next question."""
    stages = FakeStages()
    stages.lose = {"x"}
    service = make(stages, directory=FakeDirectory(stages) if has_directory else None)
    assert (await service.embed([picture("x", "bb"), text("a")])).vectors[:, 0].tolist() == [2, 1]
    assert stages.encoded == ["x", "x"]


async def test_the_last_question_needs_neither_pool_nor_store() -> None:
    """Pictures that go missing one after the other all travel with the last question."""
    stages = FakeStages()
    stages.store, stages.lose = {"y"}, {"x", "y"}
    stages.evicts = True
    await make(stages).embed([Item((ImagePart(b"x", "x"), ImagePart(b"y", "y")), "input")])
    assert stages.encoded == ["x", "x", "y"]


async def test_an_embedder_that_takes_no_rows_ends_in_an_error_after_two_rounds() -> None:
    """Encoding is asked for at most twice; then the stage is unavailable."""
    stages = FakeStages()
    stages.lose, stages.forgetful = {"x"}, True
    with pytest.raises(StageUnavailable, match="lacks 1 pictures after 2 rounds"):
        await make(stages).embed([picture("x")])
    assert (stages.asked, stages.encoded) == ([1, 1, 1], ["x", "x"])


async def test_an_unreadable_picture_names_its_place() -> None:
    """The error carries the path of the picture in the request."""
    stages = FakeStages()
    stages.unreadable = {"bad"}
    with pytest.raises(RequestError, match="cannot be read") as raised:
        await make(stages).embed([picture("x"), picture("bad", param="input[1].image")])
    assert raised.value.param == "input[1].image"


@pytest.mark.parametrize("dimensions", [0, HIDDEN + 1])
async def test_dimensions_out_of_range_are_refused(dimensions: int) -> None:
    """`dimensions` is between 1 and the hidden size."""
    with pytest.raises(RequestError, match=f"between 1 and {HIDDEN}, got {dimensions}"):
        await make(FakeStages()).embed([text("a")], dimensions)


async def test_a_request_past_its_deadline_is_answered() -> None:
    """A stage that hangs ends in DeadlineExceeded, not in silence."""
    stages = FakeStages()
    stages.hang = True
    with pytest.raises(DeadlineExceeded):
        await make(stages, timeout_s=0.01).embed([text("a")])


async def test_a_picture_that_is_surely_not_stored_is_encoded_first() -> None:
    """With a directory a new picture costs one call of each stage."""
    stages = FakeStages()
    directory = FakeDirectory(stages)
    embedded = await make(stages, directory=directory).embed([picture("x", "bb"), text("a")])
    assert embedded.vectors[:, 0].tolist() == [2, 1]
    assert (stages.asked, stages.encoded, directory.known) == ([2], ["x"], {"x"})


async def test_a_picture_that_was_lost_is_encoded_after_all() -> None:
    """What the directory remembers and the store lost costs a round, and is asked for anew."""
    stages = FakeStages()
    directory = FakeDirectory(stages)
    directory.known = {"x"}
    await make(stages, directory=directory).embed([picture("x")])
    assert (stages.asked, stages.encoded, directory.known) == ([1, 1], ["x"], {"x"})


async def test_rows_that_no_store_took_are_not_remembered() -> None:
    """Rows that travelled directly are not there for the next request."""
    stages = FakeStages()
    stages.unpublished = {"x"}
    directory = FakeDirectory(stages)
    await make(stages, directory=directory).embed([picture("x")])
    assert (stages.asked, directory.known) == ([1], set())
