"""Ranks the pictures of a folder by how well they fit a caption, through a running service.

    python examples/search.py FOLDER "a red circle"                # over HTTP
    python examples/search.py FOLDER "a red circle" --handle       # through a Serve handle, from the cluster

The pictures go out in batches; the second search of the same folder encodes nothing.
"""

from __future__ import annotations

import argparse
import base64
import json
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
Vectors = npt.NDArray[np.float32]
Embed = Callable[[Sequence[Any]], Vectors]


def embed_over_http(url: str) -> Embed:
    """Any HTTP client will do: here the standard library's."""

    def embed(items: Sequence[Any]) -> Vectors:
        body = json.dumps({"input": [as_json(item) for item in items], "encoding_format": "base64"})
        request = urllib.request.Request(
            f"{url}/v1/embeddings", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            data = json.load(answer)["data"]
        return np.stack([np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in data])

    return embed


def as_json(item: Any) -> Any:
    """A picture's bytes become a data URI; text stays as it is."""
    if isinstance(item, str):
        return item
    return {"image": f"data:;base64,{base64.b64encode(item['image']).decode()}"}


def embed_through_handle(app: str) -> Embed:
    """Inside the cluster: no HTTP, bytes stay bytes, vectors come as one array."""
    import ray
    from ray import serve

    ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="warning")
    handle = serve.get_app_handle(app)
    return lambda items: handle.embed.remote(list(items)).result()


def rank(embed: Embed, folder: Path, caption: str, batch_size: int = 32) -> list[tuple[float, Path]]:
    """Cosine similarity of each picture with the caption, best first."""
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise SystemExit(f"no pictures in {folder}")
    batches = [paths[i : i + batch_size] for i in range(0, len(paths), batch_size)]
    pictures = np.concatenate([embed([{"image": path.read_bytes()} for path in batch]) for batch in batches])
    (query,) = embed([caption])
    scores = pictures @ query  # all vectors have unit length
    return [(float(scores[i]), paths[i]) for i in np.argsort(-scores)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("caption")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--handle", action="store_true", help="use a Serve handle instead of HTTP")
    parser.add_argument("--app", default="epd", help="the application's name, with --handle")
    parser.add_argument("--top", type=int, default=5)
    arguments = parser.parse_args()
    embed = embed_through_handle(arguments.app) if arguments.handle else embed_over_http(arguments.url)
    for score, path in rank(embed, arguments.folder, arguments.caption)[: arguments.top]:
        print(f"{score:6.3f}  {path.name}")


if __name__ == "__main__":
    main()
