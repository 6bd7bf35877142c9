"""Caption-to-picture retrieval on held-out renderings: `python -m epd.demo.evaluate [--checkpoint demo]`."""

from __future__ import annotations

import argparse

import torch
from transformers.utils.logging import disable_progress_bar

from epd.demo.embedding import Embedder
from epd.demo.pictures import HELD_OUT, Pair, gallery
from epd.demo.retrieval import Retrieval
from epd.models.checkpoint import DEMO, Checkpoint

_BATCH_PICTURES = 48


def evaluate(checkpoint: Checkpoint, pairs: list[Pair]) -> Retrieval:
    """Retrieval over `pairs`, a gallery: the same number of renderings of every class, class by class."""
    embedder = Embedder(checkpoint)
    captions = list(dict.fromkeys(pair.words for pair in pairs))
    pictures = [
        embedder.embed_pictures([pair.picture for pair in pairs[start : start + _BATCH_PICTURES]])
        for start in range(0, len(pairs), _BATCH_PICTURES)
    ]
    return Retrieval.measure(
        torch.cat(pictures), embedder.embed_texts(captions), per_class=len(pairs) // len(captions)
    )


def table(found: Retrieval) -> str:
    """The result, a line for each number."""
    lines = [
        ("held-out pictures", f"{found.num_pictures}"),
        ("captions", f"{found.num_captions}"),
        ("caption to picture, top-1", f"{found.caption_to_picture:.4f}"),
        ("picture to caption, top-1", f"{found.picture_to_caption:.4f}"),
        ("smallest margin (cosine)", f"{found.smallest_margin:.4f}"),
        ("median margin (cosine)", f"{found.median_margin:.4f}"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {value:>8}" for name, value in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default=DEMO, help="a folder, or the one that comes with the package")
    parser.add_argument("--per-class", type=int, default=4, help="renderings of each of the 48 classes")
    parser.add_argument("--seed", type=int, default=0, help="of the held-out renderings")
    arguments = parser.parse_args()
    disable_progress_bar()
    pairs = gallery(HELD_OUT, arguments.per_class, arguments.seed)
    print(table(evaluate(Checkpoint.open(arguments.checkpoint), pairs)))


if __name__ == "__main__":
    main()
