"""What a client trains on: one batch, and what may be asked of a client's own data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    pass


@dataclass
class Batch:
    """Some of a client's samples.

    Attributes:
        indices: (N,) positions among the client's samples, int64, on the CPU.
        images: float images by name, each (N, C, H, W).
        labels: (N,) int64 on the training device, or None.
        epoch: local epoch, from 0.
    """

    indices: Tensor
    images: dict[str, Tensor]
    labels: Tensor | None
    epoch: int = 0


class ClientData(Protocol):
    """What a client may ask of its own data (see `atoll.data.client_data`)."""

    num_samples: int

    @property
    def labels(self) -> Tensor | None:
        """(N,) int64 labels of the client's samples, on the CPU; None where there are none."""
        ...

    def pick(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Images of chosen samples: augmented with draws from ``generator``, or as they are without one."""
        ...

    def batches(self, round: int, epochs: int, images: Sequence[str]) -> Iterator[Batch]:
        """Shuffled training batches with the named images."""
        ...

    def ordered(self) -> Iterator[Batch]:
        """Every sample once, in order and without augmentation, as ``images["image"]``."""
        ...

    def num_batches(self) -> int:
        """Batches in one epoch."""
        ...

    def plain(self, pixels: Tensor) -> Tensor:
        """Other uint8 images as the networks see them: without augmentation, on the training device."""
        ...
