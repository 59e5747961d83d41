"""Data that a report needs in addition to a run's results: the map of some test images."""

from __future__ import annotations

from pathlib import Path

import torch

from atoll.core.tree import save
from atoll.data.images import ImageSet
from atoll.data.views.views import Views
from atoll.evaluation import embed, embedding_map, map_rows
from atoll.models import Encoder
from atoll.report.pictures import thumbnails

FILE = "map.safetensors"
THUMBNAIL = 32  # largest side in pixels


def save_artifacts(
    folder: Path, encoder: Encoder, images: ImageSet, views: Views, seed: int, points: int
) -> None:
    """Write the 2-D map of some test images: points, labels and thumbnails.

    Args:
        folder: The run's folder.
        encoder: The finished encoder.
        images: The images to choose from.
        views: Converts images to the encoder's input.
        seed: The run's seed.
        points: Largest number of images on the map.
    """
    shown = images.subset(map_rows(len(images), seed, points))
    h = embed(encoder, views.plain, shown.images)
    tree = {
        "points": torch.from_numpy(embedding_map(h.cpu(), seed)),
        "thumbnails": thumbnails(shown.images.gather(torch.arange(len(shown))), THUMBNAIL),
        "labels": shown.labels,
        "classes": list(shown.classes),
    }
    save(folder / FILE, tree)
