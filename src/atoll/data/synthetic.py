"""Synthetic images of ten classes, in any number: to measure speed and memory, and to try commands without data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from atoll.core.files import hash_bytes
from atoll.core.rng import stream
from atoll.data.decode import Decoding
from atoll.data.images import ImageSet, Shape

CLASSES = 10
DEFAULT_IMAGES = 10_000
MOST_TEST_IMAGES = 10_000
NOISE = 64  # levels of grey
_WORD = 2**32 - 1


@dataclass(frozen=True)
class SyntheticPixels:
    """Images that are computed when they are read: the pattern of a class, plus noise from the image's number.

    Attributes:
        first: Number of the first image.
        count: Number of images.
        channels: Colour channels.
        size: Side in pixels.
    """

    first: int
    count: int
    channels: int
    size: int

    @property
    def shape(self) -> Shape:
        """Shape (N, C, H, W)."""
        return self.count, self.channels, self.size, self.size

    def __len__(self) -> int:
        return self.count

    @cached_property
    def _patterns(self) -> Tensor:
        shape = (CLASSES, self.channels, self.size, self.size)
        return torch.randint(256 - NOISE, shape, generator=stream(0, "synthetic"))

    def gather(self, indices: Tensor) -> Tensor:
        """See `Pixels.gather`."""
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.count:
            raise IndexError(f"an index is outside 0..{self.count - 1}")
        numbers = indices + self.first
        pixels = torch.arange(self._patterns[0].numel()).view(1, *self._patterns.shape[1:])
        draws = _mixed(numbers.view(-1, 1, 1, 1) * pixels.numel() + pixels)
        return (self._patterns[numbers % CLASSES] + (draws * NOISE >> 32)).to(torch.uint8)


def _mixed(x: Tensor) -> Tensor:
    """Map numbers to evenly spread words of 32 bits, with two rounds of xor-shift and multiplication."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & _WORD
    return x ^ (x >> 16)


def synthetic_images(first: int, count: int, decoding: Decoding, labels: bool = True) -> ImageSet:
    """Make a set of synthetic images; image n is of class n mod 10.

    Args:
        first: Number of the first image; sets with other numbers contain other images.
        count: Number of images.
        decoding: Size and channels.
        labels: Whether the set has labels.

    Example:
        >>> from atoll.data.decode import Decoding
        >>> from atoll.data.synthetic import synthetic_images
        >>> images = synthetic_images(0, 1_000_000, Decoding(image_size=8, channels=1))
        >>> len(images), images.labels[999_999].item(), tuple(images.images.shape)
        (1000000, 9, (1000000, 1, 8, 8))
    """
    return ImageSet(
        images=SyntheticPixels(first, count, decoding.channels, decoding.image_size),
        labels=torch.arange(first, first + count) % CLASSES if labels else None,
        classes=[str(c) for c in range(CLASSES)] if labels else [],
        fingerprint=hash_bytes(
            f"synthetic {first} {count} {decoding.channels} {decoding.image_size}".encode()
        ),
    )
