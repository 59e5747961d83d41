"""Five styles of images, from plain operations on tensors: no pictures, no weights, no random numbers.

They replace the stylised images of Dec-SSL's Fig. 11, which need paintings and a trained network. All functions
take and return float images (N, C, S, S) in [0, 1]. Brushes and tiles grow with the side S.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from atoll.data.views.ops import luma

DARK, LIGHT = (0.05, 0.10, 0.40), (1.00, 0.90, 0.60)  # the two inks of the duotone: blue and cream


def painting(images: Tensor) -> Tensor:
    """Paint with flat strokes: Kuwahara's filter, with reflected borders.

    Each pixel becomes the mean of one of the four square neighbourhoods at its corners: the one whose grey values
    vary least.
    """
    size = images.shape[-1]
    radius = max(1, size // 16)
    side = radius + 1
    padded = F.pad(images, [radius] * 4, mode="reflect")
    grey = _grey(padded)
    mean = F.avg_pool2d(padded, side, stride=1)
    spread = F.avg_pool2d(grey * grey, side, stride=1) - F.avg_pool2d(grey, side, stride=1) ** 2
    # Neighbourhoods begin radius pixels before a pixel, or at it.
    corners = [(top, left) for top in (0, radius) for left in (0, radius)]
    spreads = torch.stack([spread[..., y : y + size, x : x + size] for y, x in corners])
    means = torch.stack([mean[..., y : y + size, x : x + size] for y, x in corners])
    calmest = spreads.argmin(0, keepdim=True).expand(-1, -1, images.shape[1], -1, -1)
    return means.gather(0, calmest)[0]


def sketch(images: Tensor) -> Tensor:
    """Draw the outlines in black on white: 1 − the length of Sobel's gradient of the grey values, at most 1."""
    across = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]])
    kernels = torch.stack([across, across.T])[:, None]
    gradient = F.conv2d(F.pad(_grey(images), [1] * 4, mode="replicate"), kernels)
    length = gradient.square().sum(1, keepdim=True).sqrt()
    return (1 - length).clamp_(min=0).expand_as(images).clone()


def mosaic(images: Tensor) -> Tensor:
    """Lay square tiles in the mean colour of their pixels, with darker seams at the top and left."""
    size = images.shape[-1]
    tile = max(2, size // 8)
    means = F.avg_pool2d(images, tile, ceil_mode=True)
    tiles = means.repeat_interleave(tile, 2).repeat_interleave(tile, 3)[..., :size, :size]
    seam = torch.arange(size) % tile == 0
    return tiles * torch.where(seam[:, None] | seam, 0.5, 1.0)


def poster(images: Tensor) -> Tensor:
    """Print in three levels a channel: 0, ½ and 1."""
    return images.mul(3).floor_().clamp_(max=2).div_(2)


def duotone(images: Tensor) -> Tensor:
    """Print in two inks: the grey value mixes dark blue and light cream. Grey images use the inks' grey values."""
    dark, light = (torch.tensor(ink)[None, :, None, None] for ink in (DARK, LIGHT))
    if images.shape[1] != 3:
        dark, light = luma(dark), luma(light)
    return torch.lerp(dark, light, _grey(images)).expand_as(images).clone()


STYLES: dict[str, Callable[[Tensor], Tensor]] = {
    "painting": painting,
    "sketch": sketch,
    "mosaic": mosaic,
    "poster": poster,
    "duotone": duotone,
}


def _grey(images: Tensor) -> Tensor:
    return luma(images) if images.shape[1] == 3 else images.mean(1, keepdim=True)
