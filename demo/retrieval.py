"""How often the right picture, or the right caption, comes first."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Shares of queries whose first hit is of their class, and how far right and wrong pictures lie apart.

    margin of a caption: its lowest cosine to a picture of its class less its highest to any other.
    """

    num_pictures: int
    num_captions: int
    caption_to_picture: float
    picture_to_caption: float
    smallest_margin: float
    median_margin: float

    @classmethod
    def measure(cls, pictures_PH: torch.Tensor, captions_CH: torch.Tensor, per_class: int) -> Retrieval:
        """From unit vectors: one caption a class, and `per_class` pictures of each, classes in that order."""
        num_captions, num_pictures = len(captions_CH), len(pictures_PH)
        if num_pictures != num_captions * per_class:
            raise ValueError(f"{num_pictures} pictures are not {per_class} of each of {num_captions} classes")
        cosine_CP = captions_CH @ pictures_PH.T
        caption_class, picture_class = torch.arange(num_captions), torch.arange(num_pictures) // per_class
        right_CP = caption_class[:, None] == picture_class
        lowest_right = cosine_CP.masked_fill(~right_CP, torch.inf).amin(dim=1)
        highest_wrong = cosine_CP.masked_fill(right_CP, -torch.inf).amax(dim=1)
        margins = lowest_right - highest_wrong
        return cls(
            num_pictures=num_pictures,
            num_captions=num_captions,
            caption_to_picture=_share(picture_class[cosine_CP.argmax(dim=1)] == caption_class),
            picture_to_caption=_share(cosine_CP.argmax(dim=0) == picture_class),
            smallest_margin=margins.min().item(),
            median_margin=margins.median().item(),
        )


def _share(hits: torch.Tensor) -> float:
    return hits.float().mean().item()
