"""What several threads of a replica share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from tests.models.pictures import png
from tests.models.pipeline import Pipeline


def test_prompts_and_pictures_from_several_threads(sharded_pipeline: Pipeline) -> None:
    """Tokens and patches are the same as from one thread."""
    texts = [f"text number {i} <|im_end|>" * (1 + i % 5) for i in range(40)]
    files = [png(40 + 7 * i, 60, i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        rendered = list(pool.map(lambda text: sharded_pipeline.prompt.render([text]), texts))
        patches = list(pool.map(sharded_pipeline.images.patches, files))
    for text, sequence in zip(texts, rendered, strict=True):
        assert sequence.token_ids.tolist() == sharded_pipeline.prompt.render([text]).token_ids.tolist()
    for data, (found, grid) in zip(files, patches, strict=True):
        expected, same_grid = sharded_pipeline.images.patches(data)
        assert torch.equal(found, expected)
        assert grid == same_grid
