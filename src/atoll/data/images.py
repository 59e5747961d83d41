"""Decoded images with their labels, the data type that all higher layers read.

Pixels stay in their store (a memory-mapped file, a tensor, or the encoded source) and are gathered one batch at a
time; subsets are views, so a thousand clients need a thousand index tensors and no further memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.core.files import hash_bytes

Shape = tuple[int, int, int, int]
_UPLOADED = 4096  # images that are copied to a GPU at a time


class Pixels(Protocol):
    """N uint8 images of one shape, gathered by index."""

    @property
    def shape(self) -> Shape:
        """Shape (N, C, H, W)."""
        ...

    def __len__(self) -> int: ...

    def gather(self, indices: Tensor) -> Tensor:
        """Copy the images at `indices`, in that order.

        Args:
            indices: Indices of the images.

        Shape:
            - indices: (n,) int64; output: (n, C, H, W) uint8

        Raises:
            IndexError: An index is outside 0..N-1.
        """
        ...


class StoredPixels:
    """Pixels in a tensor, or in an ``.npy`` file mapped into memory.

    All processes that open a mapped file share its pages: pickling sends the path, not the pixels.

    Args:
        data: The pixels, uint8 (N, C, H, W).
        path: The mapped file; None for a tensor in memory.

    Raises:
        ValueError: The pixels have another type or number of dimensions.
    """

    def __init__(self, data: Tensor, path: Path | None = None) -> None:
        if data.dim() != 4 or data.dtype != torch.uint8:
            raise ValueError(f"pixels must be uint8 (N, C, H, W), not {data.dtype} {tuple(data.shape)}")
        self._data = data
        self._path = path

    @classmethod
    def open(cls, path: Path) -> StoredPixels:
        """Map an ``.npy`` file into memory."""
        # Copy-on-write instead of read-only: Atoll never writes to it, but torch warns of read-only arrays.
        return cls(torch.from_numpy(np.load(path, mmap_mode="c")), path)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (StoredPixels, (self._data,)) if self._path is None else (StoredPixels.open, (self._path,))

    @property
    def shape(self) -> Shape:
        """Shape (N, C, H, W)."""
        n, c, h, w = self._data.shape
        return n, c, h, w

    def __len__(self) -> int:
        return len(self._data)

    def gather(self, indices: Tensor) -> Tensor:
        """See `Pixels.gather`."""
        return self._data.index_select(0, indices)


@dataclass(frozen=True)
class SelectedPixels:
    """View of some of the images of another store.

    Attributes:
        base: The other store.
        indices: Indices of the images in it.
    """

    base: Pixels
    indices: Tensor

    @property
    def shape(self) -> Shape:
        """Shape (n, C, H, W)."""
        return (len(self.indices), *self.base.shape[1:])

    def __len__(self) -> int:
        return len(self.indices)

    def gather(self, indices: Tensor) -> Tensor:
        """See `Pixels.gather`."""
        return self.base.gather(self.indices.index_select(0, indices))


class DevicePixels:
    """Pixels in a GPU's memory; batches are gathered there and need no upload.

    Args:
        pixels: The images, all of which are copied.
        device: The GPU.
    """

    def __init__(self, pixels: Pixels, device: torch.device) -> None:
        self.shape = pixels.shape
        self._data = torch.empty(pixels.shape, dtype=torch.uint8, device=device)
        for rows in torch.split(torch.arange(len(pixels)), _UPLOADED):
            self._data[rows[0] : rows[-1] + 1] = pixels.gather(rows).to(device)

    def __len__(self) -> int:
        return len(self._data)

    def gather(self, indices: Tensor) -> Tensor:
        """See `Pixels.gather`; the result is on the GPU."""
        return self._data.index_select(0, upload(indices, self._data.device))


@dataclass
class ImageSet:
    """Images with labels and further columns.

    Attributes:
        images: The pixels.
        labels: (N,) int64, or None if there are no labels.
        classes: Class names by label; empty without labels.
        columns: Further integer columns, each (N,) int64: ``domain``, or ``client`` for a folder per client.
        column_values: Names of a column's values, for columns with names.
        fingerprint: Hash of the content and the decoding; the same on every machine.
        unread: Names of the source's columns that may hold clients and were not read.

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
    unread: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def subset(self, indices: Tensor) -> ImageSet:
        """Select the images at `indices`, in that order, without copying pixels.

        Args:
            indices: Indices of the images.

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
            unread=self.unread,
        )


def subset_fingerprint(fingerprint: str, indices: Tensor) -> str:
    """Fingerprint of a selection, from the fingerprint of the whole and the indices in their order."""
    return hash_bytes(fingerprint.encode() + indices.numpy().astype("<i8").tobytes())
