"""Images in, representations out: the frozen encoder's view of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.core.errors import UserError
from atoll.core.rng import stream
from atoll.data.images import Pixels


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every submodule is in the mode in which it was before."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def embed(
    encoder: nn.Module,
    pixels_to_float: Callable[[Tensor], Tensor],
    images: Pixels,
    *,
    batch_size: int = 512,
    device: torch.device | str | None = None,
    maps: bool = False,
) -> Tensor:
    """Representations h of images, in their order, by the frozen encoder in eval mode.

    The encoder leaves in the mode in which it came, module by module.

    Args:
        encoder: maps float images (n, C, H, W) to (n, d).
        pixels_to_float: makes a uint8 batch what the encoder reads; called on the device, batch after batch.
        images: the images.
        batch_size: images at a time.
        device: where to compute and where the result lies; None for the encoder's own.
        maps: give the feature maps before the global pooling, flattened, instead of h.

    Shape:
        - images: uint8 (N, C, H, W)
        - Output: float32 (N, d); with ``maps``, (N, channels · height · width)

    Raises:
        UserError: ``maps`` is asked of an encoder that has none.
        ValueError: the encoder gives something else than one row for each image.

    Example:
        >>> import torch
        >>> from atoll.data.images import StoredPixels
        >>> from atoll.evaluation import embed
        >>> images = StoredPixels(torch.full((4, 3, 8, 8), 255, dtype=torch.uint8))
        >>> embed(torch.nn.Flatten(), lambda pixels: pixels / 255, images, device="cpu").shape
        torch.Size([4, 192])
    """
    device = torch.device(device) if device is not None else device_of(encoder)
    forward = _feature_maps(encoder) if maps else encoder
    features = torch.empty(0, 0, device=device)
    with torch.no_grad(), evaluating(encoder):
        for start in range(0, len(images), batch_size):
            rows = torch.arange(start, min(start + batch_size, len(images)))
            h = forward(pixels_to_float(images.gather(rows).to(device)))
            if h.ndim != 2 or len(h) != len(rows):
                raise ValueError(
                    f"an encoder gives (N, d) for N images; got {tuple(h.shape)} for {len(rows)}"
                )
            if len(features) == 0:
                features = torch.empty(len(images), h.shape[1], device=device)
            features[start : start + len(h)] = h
    return features


def sample(n: int, size: int, seed: int, purpose: str) -> Tensor:
    """Which of n rows a measure looks at that cannot afford them all: drawn by the seed, ascending."""
    if n <= size:
        return torch.arange(n)
    return torch.randperm(n, generator=stream(seed, "subset", purpose))[:size].sort().values


def device_of(encoder: nn.Module) -> torch.device:
    """Where an encoder's parameters are; the CPU if it has none."""
    return next((parameter.device for parameter in encoder.parameters()), torch.device("cpu"))


def _feature_maps(encoder: nn.Module) -> Callable[[Tensor], Tensor]:
    feature_maps = getattr(encoder, "feature_maps", None)

    def forward(images: Tensor) -> Tensor:
        maps = feature_maps(images) if callable(feature_maps) else None
        if not isinstance(maps, Tensor) or maps.ndim != 4:
            raise UserError(
                f"this protocol reads feature maps before the global pooling, and {type(encoder).__name__} "
                "has none; choose another protocol, or a ResNet"
            )
        return maps.flatten(1)

    return forward
