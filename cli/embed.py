"""`epd embed`: files to vectors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from epd.cli.embedders import CannotEmbed, Embed, Failed, Vector
from epd.cli.files import find_files, read_item
from epd.cli.progress import Progress

# Requests under way at once, so that the next batch travels while one is computed.
_REQUESTS = 4


def run(options: argparse.Namespace) -> int:
    """0 when every file has its vector, 1 when some or all have not."""
    try:
        paths = find_files(options.files)
        embed, workers = _embedder(options)
        vectors, failures = embed_files(embed, paths, options.batch_size, workers)
        if options.out and vectors:
            save(Path(options.out), vectors)
        if options.query is not None and vectors:
            (query,) = embed([{"text": options.query}])
            if isinstance(query, Failed):
                raise CannotEmbed(f"the query: {query.reason}")
            for score, path in rank(query, vectors)[: options.top]:
                print(f"{score:7.4f}  {path}")
        elif not options.out:
            for path, vector in vectors.items():
                print(json.dumps({"file": str(path), "embedding": vector.tolist()}))
    except (CannotEmbed, ValueError) as error:
        print(f"epd embed: {error}", file=sys.stderr)
        return 1
    for path, reason in failures.items():
        print(f"epd embed: {path}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def embed_files(
    embed: Embed, paths: Sequence[Path], batch_size: int, workers: int = 1
) -> tuple[dict[Path, Vector], dict[Path, str]]:
    """Vectors of the files that have one, in order, and why the others have none."""
    vectors: dict[Path, Vector] = {}
    failures: dict[Path, str] = {}
    batches = [paths[i : i + batch_size] for i in range(0, len(paths), batch_size)]
    with (
        Progress(len(paths), sys.stderr, shown=None if len(batches) > 1 else False) as bar,
        ThreadPoolExecutor(workers) as threads,
    ):
        for batch in threads.map(lambda each: list(_embed_batch(embed, each)), batches):
            for path, result in batch:
                if isinstance(result, Failed):
                    failures[path] = result.reason
                else:
                    vectors[path] = result
            bar.advance(len(batch))
    return vectors, failures


def rank(query: Vector, vectors: dict[Path, Vector]) -> list[tuple[float, Path]]:
    """Cosine similarity of each file with the query, best first; all vectors have unit length."""
    scores = [(float(vector @ query), path) for path, vector in vectors.items()]
    return sorted(scores, key=lambda entry: -entry[0])


def save(path: Path, vectors: dict[Path, Vector]) -> None:
    """`vectors` float32 `[n, dimensions]` and `files` `[n]`, as numpy reads them."""
    with path.open("wb") as file:
        np.savez(
            file, vectors=np.stack(list(vectors.values())), files=np.array([str(each) for each in vectors])
        )


def _embed_batch(embed: Embed, paths: Sequence[Path]) -> Iterator[tuple[Path, Vector | Failed]]:
    items: dict[Path, Any] = {}
    for path in paths:
        try:
            items[path] = read_item(path)
        except (OSError, ValueError) as error:
            yield path, Failed(getattr(error, "strerror", None) or str(error))
    if items:
        yield from zip(items, embed(list(items.values())), strict=True)


def _embedder(options: argparse.Namespace) -> tuple[Embed, int]:
    """The embedder, and from how many threads to call it."""
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.local:
        from epd.cli.local import LocalEmbedder

        return LocalEmbedder(options.model, options.instruction, options.dimensions), 1
    from epd.cli.remote import RemoteEmbedder

    asked = {"instruction": options.instruction, "dimensions": options.dimensions}
    fields = {name: value for name, value in asked.items() if value is not None}
    return RemoteEmbedder(options.url, os.environ.get(options.key_env), fields), _REQUESTS
