"""Colour jitter of many images, each of which takes the steps in its own order.

Images are sorted by the number of steps that precede the hue's. A step before the hue then applies only to the
first images, and the same step after the hue to the others: these are slices, which change in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.data.views import ops as ops
from atoll.data.views.draws import Draw

HUE = len(ops.BLENDS)  # the column of the hue among a draw's factors, behind the blends'


class Jitter(NamedTuple):
    """Colour steps of images that are sorted chunk by chunk.

    Attributes:
        before: Number of steps that precede the hue's, of the sorted images, on the CPU; −1 for an image without
            colour steps, so that these are last.
        weights: Three blends, in each image's own order, with three weights each for the sorted images; see
            `atoll.data.views.ops.blend_`.
        hue: Rotation of the hue of the sorted images.
        places: The place of each image, in the original order, among the sorted ones of its chunk.

    Shape:
        before, hue, places: (N,); weights: (3, 3, N).
    """

    before: Tensor
    weights: Tensor
    hue: Tensor
    places: Tensor

    def apply(self, views: Tensor, chunk: slice) -> Tensor:
        """Apply the steps to the sorted images of a chunk, which change, and return them in the original order.

        Shape:
            views, result: (N, C, H, W).
        """
        weights, hue = self.weights[..., chunk], self.hue[chunk]
        count, *ends = (self.before[chunk] >= torch.arange(HUE + 1)[:, None]).sum(1).tolist()
        for weight, end in zip(weights, ends, strict=True):
            ops.blend_(views[:end], *weight[:, :end])
        ops.adjust_hue_(views[:count], hue[:count])
        for weight, end in zip(weights, ends, strict=True):
            ops.blend_(views[end:count], *weight[:, end:count])
        return views.index_select(0, self.places[chunk])


def plan_jitter(draw: Draw, chunk: int, device: torch.device) -> tuple[Tensor, Jitter]:
    """Sort images for the colour steps.

    Args:
        draw: Random parameters of the images.
        chunk: Number of images that are processed together; each chunk is sorted by itself.
        device: Device of the images.

    Returns:
        The indices of the sorted images, (N,), on the CPU; and the steps of the images in this order.
    """
    before = torch.where(draw.jitter, draw.order.argsort(1)[:, HUE], -1)
    first = torch.arange(len(draw)) // chunk * chunk
    # `before` is −1 … HUE, so a distance of HUE + 2 keeps the chunks apart.
    order = (before - (HUE + 2) * first).argsort(descending=True, stable=True)
    blends = draw.order[draw.order != HUE].view(len(draw), HUE)
    weights = ops.blend_weights(draw.factors.gather(1, blends), blends)[:, order].movedim(2, 0)
    uploads = weights, draw.factors[order, HUE], order.argsort() - first
    return order, Jitter(before[order], *(upload(each, device) for each in uploads))
