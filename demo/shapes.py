"""Synthetic pictures of coloured shapes and captions for them, deterministic per seed.

48 classes (8 colours x 6 shapes) on a dark ground. A rendering draws its size, place, tilt and tints
from the generator that it is given; a caption draws its wording.
"""

from __future__ import annotations

import hashlib
import io
import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

RGB = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, RGB] = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 220, 40),
    "purple": (130, 50, 170),
    "orange": (245, 140, 30),
    "cyan": (50, 200, 220),
    "pink": (245, 130, 190),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")

TEMPLATES = (
    "a {colour} {shape}",
    "a picture of a {colour} {shape}",
    "one {colour} {shape} on a dark background",
    "the shape is a {shape} and its colour is {colour}",
    "{colour} {shape}",
    "find the {colour} {shape}",
    "an image with a {shape} that is {colour}",
    "{shape}, {colour}",
)

_SIDES = (96, 112, 128)  # pixels
_OVERSAMPLING = 2  # drawn this much larger, then box-filtered down, for smooth edges
_TINT_JITTER = 14  # grey levels, each channel
_PLACE_JITTER = 0.07  # of a side, from the centre
_TILT_JITTER = 0.08  # radians


@dataclass(frozen=True, slots=True, order=True)
class ShapeClass:
    """What a picture shows: one of `COLOURS` and one of `SHAPES`."""

    colour: str
    shape: str


CLASSES = tuple(ShapeClass(colour, shape) for colour in COLOURS for shape in SHAPES)


def generator(split: str, seed: int) -> random.Random:
    """Random numbers of one split ("train", "held-out", ...): streams of different splits share no seed.

    The seed is a 256-bit hash of the split's name and the number, so that no two pairs meet.
    """
    return random.Random(hashlib.sha256(f"{split}/{seed}".encode()).digest())


def caption(what: ShapeClass, rng: random.Random | None = None) -> str:
    """Words for `what`: a wording drawn from `rng`, or the plainest one without it."""
    template = TEMPLATES[0] if rng is None else rng.choice(TEMPLATES)
    return template.format(colour=what.colour, shape=what.shape)


def render(what: ShapeClass, rng: random.Random) -> Image.Image:
    """RGB picture of `what`, sides of 96 to 128 pixels, everything else drawn from `rng`."""
    width, height = rng.choice(_SIDES), rng.choice(_SIDES)
    wide, high = width * _OVERSAMPLING, height * _OVERSAMPLING
    grey = rng.randint(15, 60)
    picture = Image.new("RGB", (wide, high), _jitter((grey, grey, grey), rng))
    colour = _jitter(COLOURS[what.colour], rng)
    radius = min(wide, high) * rng.uniform(0.32, 0.46)
    centre = (
        wide * (0.5 + rng.uniform(-_PLACE_JITTER, _PLACE_JITTER)),
        high * (0.5 + rng.uniform(-_PLACE_JITTER, _PLACE_JITTER)),
    )
    tilt = rng.uniform(-_TILT_JITTER, _TILT_JITTER)
    _draw(ImageDraw.Draw(picture), what.shape, centre, radius, tilt, colour)
    return picture.resize((width, height), Image.Resampling.BOX)


def render_png(what: ShapeClass, rng: random.Random) -> bytes:
    """`render` as the bytes of a PNG file, the form in which a client would send it."""
    buffer = io.BytesIO()
    render(what, rng).save(buffer, format="PNG")
    return buffer.getvalue()


def _jitter(colour: RGB, rng: random.Random) -> RGB:
    red, green, blue = (
        max(0, min(255, value + rng.randint(-_TINT_JITTER, _TINT_JITTER))) for value in colour
    )
    return red, green, blue


def _draw(
    canvas: ImageDraw.ImageDraw, shape: str, centre: Point, radius: float, tilt: float, colour: RGB
) -> None:
    x, y = centre
    if shape == "circle":
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif shape == "square":
        canvas.polygon(_ring(4, (1.0,), centre, radius, tilt + math.pi / 4), fill=colour)
    elif shape == "triangle":
        canvas.polygon(_ring(3, (1.0,), centre, radius, tilt), fill=colour)
    elif shape == "star":
        canvas.polygon(_ring(10, (1.0, 0.42), centre, radius, tilt), fill=colour)
    elif shape == "diamond":
        half = 0.65 * radius
        canvas.polygon([(x, y - radius), (x + half, y), (x, y + radius), (x - half, y)], fill=colour)
    elif shape == "cross":
        half = 0.33 * radius
        canvas.rectangle((x - radius, y - half, x + radius, y + half), fill=colour)
        canvas.rectangle((x - half, y - radius, x + half, y + radius), fill=colour)
    else:
        raise ValueError(f"no such shape: {shape!r}; there are {', '.join(SHAPES)}")


def _ring(
    num_corners: int, reach: tuple[float, ...], centre: Point, radius: float, tilt: float
) -> list[Point]:
    """Corners around `centre`, clockwise from the top; `reach` cycles over them, in radii."""
    angles = [tilt + 2 * math.pi * corner / num_corners for corner in range(num_corners)]
    lengths = [radius * reach[corner % len(reach)] for corner in range(num_corners)]
    return [
        (centre[0] + length * math.sin(angle), centre[1] - length * math.cos(angle))
        for angle, length in zip(angles, lengths, strict=True)
    ]
