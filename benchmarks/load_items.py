"""What `benchmarks.serve_load` sends: five kinds of items, the same for every run of a seed."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate

from PIL import Image

from epd.demo.shapes import COLOURS, SHAPES

_SIDES = (128, 192, 256, 320)  # pixels: 16 to 100 tokens of the demo model
WORDS = (*COLOURS, *SHAPES, "a", "picture", "of", "the", "and", "on", "with", "small", "large", "dark")
_NUM_REPEATED, _ZIPF = 200, 1.1


@dataclass(frozen=True, slots=True)
class Item:
    """A text, a picture's file, or both."""

    text: str | None = None
    picture: bytes | None = None

    def fields(self) -> dict[str, str]:
        """The item as it stands in a request's `input`."""
        fields: dict[str, str] = {}
        if self.picture is not None:
            fields["image"] = f"data:image/jpeg;base64,{base64.b64encode(self.picture).decode()}"
        if self.text is not None:
            fields["text"] = self.text
        return fields


def bodies(items: Sequence[Item], per_request: int) -> list[bytes]:
    """Requests of `per_request` items each, in order."""
    starts = range(0, len(items), per_request)
    groups = ([item.fields() for item in items[start : start + per_request]] for start in starts)
    return [json.dumps({"input": group, "encoding_format": "base64"}).encode() for group in groups]


Items = Iterator[Item]


def short_texts(rng: random.Random) -> Items:
    """Queries of 3 to 12 words."""
    while True:
        yield Item(_text(rng, rng.randint(3, 12)))


def mixed_texts(rng: random.Random) -> Items:
    """4 to 400 words, as many short as long ones on a logarithmic scale."""
    while True:
        yield Item(_text(rng, round(4 * 100 ** rng.random())))


def new_pictures(rng: random.Random) -> Items:
    """Pictures that nobody has seen."""
    while True:
        yield Item(picture=_picture(rng))


def repeated_pictures(rng: random.Random) -> Items:
    """Pictures out of 200, the k-th most popular one asked for in proportion to k ** -1.1 (Zipf)."""
    pictures = [_picture(rng) for _ in range(_NUM_REPEATED)]
    weights = list(accumulate(rank**-_ZIPF for rank in range(1, _NUM_REPEATED + 1)))
    while True:
        (picture,) = rng.choices(pictures, cum_weights=weights)
        yield Item(picture=picture)


def mixed(rng: random.Random) -> Items:
    """Half short texts, three tenths repeated pictures with a text, two tenths new pictures."""
    texts, repeated, new = short_texts(rng), repeated_pictures(rng), new_pictures(rng)
    while True:
        draw = rng.random()
        if draw < 0.5:
            yield next(texts)
        elif draw < 0.8:
            yield Item(_text(rng, 6), next(repeated).picture)
        else:
            yield next(new)


WORKLOADS: dict[str, Callable[[random.Random], Items]] = {
    "text, short": short_texts,
    "text, mixed lengths": mixed_texts,
    "pictures, all new": new_pictures,
    "pictures, repeated": repeated_pictures,
    "mixed": mixed,
}


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def _picture(rng: random.Random) -> bytes:
    """A smooth random pattern as JPEG, a few kilobytes."""
    coarse = Image.frombytes("RGB", (8, 8), rng.randbytes(192))
    file = BytesIO()
    coarse.resize((rng.choice(_SIDES), rng.choice(_SIDES)), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()
