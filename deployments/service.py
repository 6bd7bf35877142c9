"""The orchestration of one request through both stages. Knows nothing of Ray or HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from epd.deployments.errors import DeadlineExceeded, RequestError, StageUnavailable
from epd.deployments.items import Item
from epd.deployments.messages import EmbedReply, EncodeReply, MediaMessage, RowsMessage, SequenceMessage
from epd.deployments.preparation import ItemPreparer, PreparedRequest
from epd.deployments.timing import Timings, merge

# After the first ask, missing pictures are encoded and the embedder is asked again, at most this often. The
# last time all pictures of what is left travel with the question, so that it needs neither pool nor store.
MAX_ENCODE_ROUNDS = 2


class EncoderClient(Protocol):
    """The encoder stage as the orchestration sees it."""

    async def encode(self, media: Sequence[MediaMessage]) -> EncodeReply: ...


class EmbedderClient(Protocol):
    """The embedder stage as the orchestration sees it."""

    async def embed(
        self, sequences: Sequence[SequenceMessage], rows: dict[str, RowsMessage], dimensions: int | None
    ) -> EmbedReply: ...


FetchUrls = Callable[[Sequence[Item]], Awaitable[Sequence[Item]]]


class Directory(Protocol):
    """What is known of the store's content: see `epd.deployments.directory`."""

    async def absent(self, keys: Collection[str]) -> list[str]: ...

    def remember(self, keys: Iterable[str]) -> None: ...

    def forget(self, keys: Iterable[str]) -> None: ...


@dataclass(frozen=True, slots=True)
class Embedded:
    """vectors: float32 `[num_items, dimensions]`, L2-normalised. num_tokens: text and picture tokens.

    timings: seconds of each step, those of the stages behind `encoder.` and `embedder.`.
    """

    vectors: npt.NDArray[np.float32]
    num_tokens: int
    timings: Mapping[str, float] = field(default_factory=dict)


class EmbeddingService:
    """Prepares a request, has encoded what is surely not stored, and asks the embedder.

    What the embedder lacks all the same is encoded, and it is asked again.
    directory: None asks the embedder first, always. fetch_urls: replaces URLs of pictures by what is there.
    """

    def __init__(
        self,
        preparer: ItemPreparer,
        encoder: EncoderClient | None,
        embedder: EmbedderClient,
        *,
        hidden_size: int,
        request_timeout_s: float,
        directory: Directory | None = None,
        timings: Timings | None = None,
        fetch_urls: FetchUrls | None = None,
    ) -> None:
        self._preparer = preparer
        self._encoder = encoder
        self._embedder = embedder
        self._hidden_size = hidden_size
        self._request_timeout_s = request_timeout_s
        self._directory = directory
        self._fetch_urls = fetch_urls
        self._timings = timings or Timings()

    async def embed(
        self, items: Sequence[Item], dimensions: int | None = None, salt: str | None = None
    ) -> Embedded:
        """Vectors of the items, in order.

        Raises RequestError for the caller's mistakes, DeadlineExceeded, Overloaded or StageUnavailable.
        """
        if dimensions is not None and not 1 <= dimensions <= self._hidden_size:
            raise RequestError(f"must be between 1 and {self._hidden_size}, got {dimensions}", "dimensions")
        with self._timings.collect() as timings:
            try:
                async with asyncio.timeout(self._request_timeout_s):
                    with self._timings.step("total"):
                        if self._fetch_urls is not None:
                            items = await self._fetch_urls(items)
                        with self._timings.step("prepare"):
                            request = await asyncio.to_thread(self._preparer.prepare, items, salt)
                        vectors = await self._run(request, dimensions, [item.param for item in items])
            except TimeoutError:
                raise DeadlineExceeded(f"not answered within {self._request_timeout_s} s") from None
        return Embedded(vectors, request.num_tokens, timings)

    async def _run(
        self, request: PreparedRequest, dimensions: int | None, params: Sequence[str]
    ) -> npt.NDArray[np.float32]:
        width = dimensions or self._hidden_size
        vectors = np.empty((len(request.sequences), width), np.float32)
        pending = list(range(len(request.sequences)))
        rows: dict[str, RowsMessage] = {}
        encoded: set[str] = set()
        if absent := await self._find_absent(request):
            rows |= await self._encode(request, absent, encoded)
        for rounds_left in reversed(range(MAX_ENCODE_ROUNDS + 1)):
            reply = await self._embedder.embed([request.sequences[i] for i in pending], rows, dimensions)
            merge(reply.timings, "embedder.")
            for index, message in reply.failed.items():
                raise RequestError(message, params[pending[index]])
            vectors[[pending[i] for i in reply.done]] = reply.vectors
            pending = [index for i, index in enumerate(pending) if i not in set(reply.done)]
            if not pending:
                if self._directory is not None:
                    self._directory.remember(request.media.keys() - rows.keys())
                return vectors
            if self._directory is not None:
                self._directory.forget(reply.missing)
            if rounds_left > 1:
                rows |= await self._encode(request, reply.missing, encoded)
            elif rounds_left:
                left = {ref.key: None for i in pending for ref in request.sequences[i].media}
                encoded |= left.keys()
                rows |= await self._encode(request, [key for key in left if key not in rows], encoded)
        raise StageUnavailable(
            f"the embedder lacks {len(reply.missing)} pictures after {MAX_ENCODE_ROUNDS} rounds of encoding"
        )

    async def _find_absent(self, request: PreparedRequest) -> list[str]:
        """Pictures that are surely not stored: to be encoded before the embedder is asked at all."""
        if self._directory is None or not request.media:
            return []
        with self._timings.step("lookup"):
            return await self._directory.absent(request.media)

    async def _encode(
        self, request: PreparedRequest, missing: Sequence[str], encoded: set[str]
    ) -> dict[str, RowsMessage]:
        """Has pictures encoded; returns the rows that no store holds, and of those `encoded` before."""
        assert self._encoder is not None, "a text-only model has no pictures to encode"
        media = [replace(request.media[key], direct=key in encoded) for key in missing]
        encoded |= set(missing)
        reply = await self._encoder.encode(media)
        merge(reply.timings, "encoder.")
        for key, message in reply.failed.items():
            raise RequestError(message, request.params[key])
        return reply.direct
