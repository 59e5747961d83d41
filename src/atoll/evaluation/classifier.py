"""End-to-end accuracy of a classifier that the federation trained."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.data.images import ImageSet
from atoll.evaluation.embed import embed


def classifier_correct(
    networks: nn.Module, pixels_to_float: Callable[[Tensor], Tensor], images: ImageSet, batch_size: int = 512
) -> Tensor:
    """Whether a classifier recognises each of the images without augmentation.

    Args:
        networks: Maps float images (n, C, H, W) to logits (n, classes); evaluated in eval mode.
        pixels_to_float: Converts a uint8 batch to the networks' input.
        images: Labelled images.
        batch_size: Number of images in a batch.

    Returns:
        For each image, whether its largest logit is that of its class; on the CPU.

    Shape:
        - Output: (N,) bool

    Raises:
        UserError: The images have no labels.
    """
    if images.labels is None:
        raise UserError("the accuracy of a classifier needs labelled images, and these have no labels")
    logits = embed(networks, pixels_to_float, images.images, batch_size=batch_size)
    return logits.argmax(1).cpu() == images.labels


def classifier_accuracy(
    networks: nn.Module, pixels_to_float: Callable[[Tensor], Tensor], images: ImageSet, batch_size: int = 512
) -> float:
    """Accuracy of a classifier on images without augmentation; see `classifier_correct`."""
    return float(classifier_correct(networks, pixels_to_float, images, batch_size).double().mean())
