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
        labels: (N,) int64 on the training device; None if there are none, or no component needs them.
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
        sizes = part_sizes(len(self.indices), count)
        if len(sizes) == 1:
            return [(self, 1.0)]
        made, start = [], 0
        for size in sizes:
            one = slice(start, start + size)
            images = {name: image[one] for name, image in self.images.items()}
            labels = None if self.labels is None else self.labels[one]
            made.append((Batch(self.indices[one], images, labels, self.epoch), size / len(self.indices)))
            start += size
        return made


def part_sizes(n: int, count: int) -> list[int]:
    """Sizes of at most ``count`` parts of n samples, each at least two samples, which differ by at most one.

    Example:
        >>> from atoll.data.batch import part_sizes
        >>> part_sizes(20, 3), part_sizes(5, 4), part_sizes(1, 2)
        ([7, 7, 6], [3, 2], [1])
    """
    count = max(1, min(count, n // 2))
    smallest, larger = divmod(n, count)
    return [smallest + 1] * larger + [smallest] * (count - larger)


class ClientData(Protocol):
    """Interface of a client's data (see `atoll.data.client_data`).

    Attributes:
        num_samples: Number of the client's samples.
    """

    num_samples: int

    @property
    def labels(self) -> Tensor | None:
        """Labels of the client's samples, (N,) int64, on the CPU; None under the same conditions as in `Batch`."""
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
