"""End-to-end accuracy: what a classifier that the federation itself trained gets right."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.data.images import ImageSet
from atoll.evaluation.embed import embed


def classifier_accuracy(
    networks: nn.Module, pixels_to_float: Callable[[Tensor], Tensor], images: ImageSet, batch_size: int = 512
) -> float:
    """Share of un-augmented images whose largest logit is their class's.

    Args:
        networks: from float images (n, C, H, W) to logits (n, classes); measured in eval mode.
        pixels_to_float: makes a uint8 batch what they read.
        images: labelled images.
        batch_size: images at a time.

    Raises:
        UserError: the images have no labels.
    """
    if images.labels is None:
        raise UserError("the accuracy of a classifier needs labelled images, and these have no labels")
    logits = embed(networks, pixels_to_float, images.images, batch_size=batch_size)
    return float((logits.argmax(1).cpu() == images.labels).double().mean())
