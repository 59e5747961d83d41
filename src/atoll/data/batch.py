"""Training batch of a client, and the interface of a client's data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass
class Batch:
    """Batch of a client's samples.

    Attributes:
        indices: (N,) positions among the client's samples, int64, on the CPU.
        images: Float images by name, each (N, C, H, W).
        labels: (N,) int64 on the training device, or None if there are no labels.
        epoch: Local epoch, from 0.
    """

    indices: Tensor
    images: dict[str, Tensor]
    labels: Tensor | None
    epoch: int = 0

    def parts(self, count: int) -> list[tuple[Batch, float]]:
        """Cut the batch into parts of at least two samples, whose sizes differ by at most one.

        Returns:
            At most ``count`` parts, each with its share of the samples; the batch itself if it is the only one.
        """
        n = len(self.indices)
        count = min(count, n // 2)
        if count < 2:
            return [(self, 1.0)]
        made = []
        for rows in torch.arange(n).tensor_split(count):
            one = slice(int(rows[0]), int(rows[-1]) + 1)
            images = {name: image[one] for name, image in self.images.items()}
            labels = None if self.labels is None else self.labels[one]
            made.append((Batch(self.indices[one], images, labels, self.epoch), len(rows) / n))
        return made


class ClientData(Protocol):
    """Interface of a client's data (see `atoll.data.client_data`).

    Attributes:
        num_samples: Number of the client's samples.
    """

    num_samples: int

    @property
    def labels(self) -> Tensor | None:
        """Labels of the client's samples, (N,) int64, on the CPU; None if there are none."""
        ...

    def pick(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Load images of chosen samples: augmented with draws from ``generator``, or not augmented without one."""
        ...

    def batches(self, round: int, epochs: int, images: Sequence[str]) -> Iterator[Batch]:
        """Iterate over shuffled training batches with the named images."""
        ...

    def ordered(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Iterate over every sample once, in order, as ``images["image"]``, augmented as by `pick`."""
        ...

    def num_batches(self) -> int:
        """Number of batches in one epoch."""
        ...

    def plain(self, pixels: Tensor) -> Tensor:
        """Convert other uint8 images to the networks' input: without augmentation, on the training device."""
        ...
