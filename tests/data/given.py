"""Images as Python code gives them, and a recipe to train on them."""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch.utils.data import Dataset


def pixels(count: int = 60, size: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


LABELS = [i % 3 for i in range(60)]


class Pairs(Dataset):
    """A dataset of one's own."""

    def __init__(self, images: np.ndarray, labels: list[int]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[row]), self.labels[row]


def clients(images: np.ndarray) -> dict[str, Pairs]:
    return {
        "north": Pairs(images[:25], LABELS[:25]),
        "south": Pairs(images[25:], LABELS[25:]),
    }


def small(**tables: dict[str, object]) -> dict[str, object]:
    return {
        "name": "given",
        "data": {"image_size": 8},
        "partition": {"kind": "iid", "clients": 2},
        "model": {"encoder": "resnet-narrow", "width": 4, "stem": "strided", "projector_hidden": [16]},
        "method": {"name": "fed_simclr"},
        "train": {"rounds": 3, "epochs": 1, "batch_size": 16, "lr": 0.01},
        "evaluation": {"at_end": [], "every": 0, "map_points": 0},
        "engine": {"workers": 1},
        **tables,
    }


class Named(Pairs):
    """A dataset with names of its classes, which may be those of its client alone."""

    def __init__(self, images: np.ndarray, labels: list[int], classes: object) -> None:
        super().__init__(images, labels)
        self.classes = classes
