"""Crops of many images, resized, shifted and flipped: the taps of each axis, which `separable_turned` sums up."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.data.views.draws import Draw
from atoll.data.views.ops import Taps, reflect, resize_taps


def plan_crops(
    draw: Draw, order: Tensor, size: int, interpolation: str, device: torch.device
) -> tuple[Taps, Taps]:
    """Return the taps of the rows and of the columns of views.

    Args:
        draw: Random parameters of N views.
        order: (N,), the views' positions in the draw, in the order of the results.
        size: Side of the views, S.
        interpolation: ``"bilinear"`` or ``"bicubic"``.
        device: Device of the images.

    Shape:
        results: (N, S, K).

    Raises:
        UserError: The interpolation is unknown.
    """
    start, extent = torch.stack([draw.top, draw.left]), torch.stack([draw.height, draw.width])
    flip, shift = torch.stack([torch.zeros_like(draw.flip), draw.flip]), draw.shift.T
    # Counted from the crop's first pixel, the taps of many axes are equal, and are computed once. A shift lies
    # between −size and size, so that 2·size numbers keep shifts, flips and extents apart.
    keys, key = torch.unique((2 * extent + flip) * 2 * size + shift, return_inverse=True)
    axes = torch.arange(key.numel())
    example = torch.empty_like(keys).scatter_(0, key.flatten(), axes)  # any axis of each key
    extent, flip, shift = (each.flatten()[example] for each in (extent, flip, shift))
    shown = torch.arange(size)
    positions = reflect(torch.where(flip[:, None], size - 1 - shown, shown) + shift[:, None], size)
    taps = resize_taps(upload(extent, device), upload(positions, device), int(extent.max()), interpolation)
    (rows, columns), (top, left) = upload(key[:, order], device), upload(start[:, order], device)
    return taps.choose(rows, top), taps.choose(columns, left)
