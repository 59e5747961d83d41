"""Representations of a data set by a frozen encoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from atoll.core.devices import upload
from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.data.images import Pixels
from atoll.data.views.options import ViewOptions
from atoll.data.views.views import Views, make_views
from atoll.models import Encoder
from atoll.models.encoder import input_metadata
from atoll.models.norms import evaluating


def embed(
    encoder: nn.Module,
    pixels_to_float: Callable[[Tensor], Tensor],
    images: Pixels,
    *,
    batch_size: int = 512,
    device: torch.device | str | None = None,
    maps: bool = False,
) -> Tensor:
    """Compute representations h of images, in their order, with the frozen encoder in eval mode.

    Afterwards, every submodule of the encoder has its previous mode again.

    Args:
        encoder: Maps float images (n, C, H, W) to (n, d).
        pixels_to_float: Converts a uint8 batch to the encoder's input; called on the device for every batch.
        images: The images.
        batch_size: Number of images in a batch.
        device: Device of the computation and of the result; None for the encoder's device.
        maps: Return the feature maps before the global pooling, flattened, instead of h.

    Shape:
        - images: uint8 (N, C, H, W)
        - Output: float32 (N, d); with ``maps``, (N, channels · height · width)

    Raises:
        UserError: ``maps`` is True and the encoder has no feature maps.
        ValueError: The encoder does not return one row for each image.

    Example:
        >>> import torch
        >>> from atoll.data.images import StoredPixels
        >>> from atoll.evaluation import embed
        >>> images = StoredPixels(torch.full((4, 3, 8, 8), 255, dtype=torch.uint8))
        >>> embed(torch.nn.Flatten(), lambda pixels: pixels / 255, images, device="cpu").shape
        torch.Size([4, 192])
    """
    device = torch.device(device) if device is not None else device_of(encoder)
    forward = _flat_maps(encoder) if maps else encoder
    features = torch.empty(0, 0, device=device)
    with torch.no_grad(), evaluating(encoder):
        for start in range(0, len(images), batch_size):
            rows = torch.arange(start, min(start + batch_size, len(images)))
            h = forward(pixels_to_float(upload(images.gather(rows), device)))
            if h.ndim != 2 or len(h) != len(rows):
                raise ValueError(
                    f"an encoder must return (N, d) for N images; got {tuple(h.shape)} for {len(rows)}"
                )
            if len(features) == 0:
                features = torch.empty(len(images), h.shape[1], device=device)
            features[start : start + len(h)] = h
    return features


def input_views(encoder: Encoder, image_size: int) -> Views:
    """Views that convert decoded images to the input of an encoder from a file, according to its metadata.

    Args:
        encoder: The encoder that `atoll.models.load_encoder` read.
        image_size: Side of the images in pixels.
    """
    about = input_metadata(encoder)
    size, mean, std = about["image_size"], tuple(about["mean"]), tuple(about["std"])
    return make_views(
        ViewOptions(preset="none", size=size, mean=mean, std=std), image_size, about["channels"]
    )


def sample(n: int, size: int, seed: int, purpose: str) -> Tensor:
    """Draw a random subset of row indices, for metrics that are too expensive for all rows.

    Args:
        n: Number of rows.
        size: Number of rows to draw; all rows if there are fewer.
        seed: The run's seed.
        purpose: Name of the random stream.

    Shape:
        - Output: (min(n, size),) int64, ascending
    """
    if n <= size:
        return torch.arange(n)
    return torch.randperm(n, generator=stream(seed, "subset", purpose))[:size].sort().values


def device_of(encoder: nn.Module) -> torch.device:
    """Device of an encoder's parameters; the CPU if it has none."""
    return next((parameter.device for parameter in encoder.parameters()), torch.device("cpu"))


def feature_maps(encoder: nn.Module) -> Callable[[Tensor], object] | None:
    """What gives an encoder's feature maps before its global pooling, as in ResNets of Atoll; None without any."""
    found = getattr(encoder, "feature_maps", None)
    return found if callable(found) else None


def _flat_maps(encoder: nn.Module) -> Callable[[Tensor], Tensor]:
    make = feature_maps(encoder)

    def forward(images: Tensor) -> Tensor:
        maps = make(images) if make is not None else None
        if not isinstance(maps, Tensor) or maps.ndim != 4:
            raise UserError(
                f"this protocol reads feature maps before the global pooling, and {type(encoder).__name__} "
                "has none; choose another protocol, or a ResNet"
            )
        return maps.flatten(1)

    return forward
