"""Decoded images with their labels: what every floor above reads.

Pixels stay where they are (a memory-mapped file, a tensor, or the encoded source) and are gathered a batch at
a time; subsets are views, so that a thousand clients cost a thousand index tensors and nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, int, int, int]


class Pixels(Protocol):
    """N uint8 images of one shape, gathered by index."""

    @property
    def shape(self) -> Shape:
        """(N, C, H, W)."""
        ...

    def __len__(self) -> int: ...

    def gather(self, indices: Tensor) -> Tensor:
        """Copies the images at `indices`, in that order.

        Shape:
            - indices: (n,) int64; output: (n, C, H, W) uint8

        Raises:
            IndexError: An index is outside 0..N-1.
        """
        ...


class StoredPixels:
    """Pixels in a tensor, or in an ``.npy`` file mapped into memory.

    A mapped file's pages are shared by all processes that open it: pickling sends the path, not the pixels.
    """

    def __init__(self, data: Tensor, path: Path | None = None) -> None:
        if data.dim() != 4 or data.dtype != torch.uint8:
            raise ValueError(f"pixels must be uint8 (N, C, H, W), not {data.dtype} {tuple(data.shape)}")
        self._data = data
        self._path = path

    @classmethod
    def open(cls, path: Path) -> StoredPixels:
        """Maps an ``.npy`` file into memory."""
        # Copy-on-write, not read-only: nothing writes, but torch warns of tensors that it may not write to.
        return cls(torch.from_numpy(np.load(path, mmap_mode="c")), path)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (StoredPixels, (self._data,)) if self._path is None else (StoredPixels.open, (self._path,))

    @property
    def shape(self) -> Shape:
        """(N, C, H, W)."""
        n, c, h, w = self._data.shape
        return n, c, h, w

    def __len__(self) -> int:
        return len(self._data)

    def gather(self, indices: Tensor) -> Tensor:
        """See `Pixels.gather`."""
        return self._data.index_select(0, indices)


@dataclass(frozen=True)
class SelectedPixels:
    """A view of some of another store's images."""

    base: Pixels
    indices: Tensor

    @property
    def shape(self) -> Shape:
        """(n, C, H, W)."""
        return (len(self.indices), *self.base.shape[1:])

    def __len__(self) -> int:
        return len(self.indices)

    def gather(self, indices: Tensor) -> Tensor:
        """See `Pixels.gather`."""
        return self.base.gather(self.indices.index_select(0, indices))


@dataclass
class ImageSet:
    """Images and what is known of each.

    Attributes:
        images: The pixels.
        labels: (N,) int64, or None where there are none.
        classes: Class names by label; empty without labels.
        columns: Further integer columns, each (N,) int64: ``domain``, or ``client`` of a folder per client.
        column_values: Names of a column's values, where it has names.
        fingerprint: Hash of the content and of how it was decoded; the same on every machine.

    Example:
        >>> import torch
        >>> from atoll.data.images import ImageSet, StoredPixels
        >>> pixels = StoredPixels(torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
        >>> images = ImageSet(pixels, labels=torch.tensor([0, 0, 1, 1]), classes=["cat", "dog"])
        >>> images.subset(torch.tensor([3, 0])).labels
        tensor([1, 0])
    """

    images: Pixels
    labels: Tensor | None = None
    classes: list[str] = field(default_factory=list)
    columns: dict[str, Tensor] = field(default_factory=dict)
    column_values: dict[str, list[str]] = field(default_factory=dict)
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, indices: Tensor) -> ImageSet:
        """The images at `indices`, in that order; pixels are not copied.

        Shape:
            - indices: (n,) int64
        """
        images = SelectedPixels(self.images, indices)
        if isinstance(self.images, SelectedPixels):  # a view of a view reads the store directly
            images = SelectedPixels(self.images.base, self.images.indices.index_select(0, indices))
        return ImageSet(
            images=images,
            labels=None if self.labels is None else self.labels.index_select(0, indices),
            classes=self.classes,
            columns={name: values.index_select(0, indices) for name, values in self.columns.items()},
            column_values=self.column_values,
            fingerprint=subset_fingerprint(self.fingerprint, indices),
        )


def subset_fingerprint(fingerprint: str, indices: Tensor) -> str:
    """The fingerprint of a selection: of the whole, and of which images in which order."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=16)
    digest.update(indices.to(torch.int64).numpy().astype("<i8").tobytes())
    return digest.hexdigest()
