"""Corruptions of images that need no assets, with the parameters of CIFAR-10-C.

All functions take float images (N, C, S, S) in [0, 1], a parameter, and one generator for each image, so that the
noise of an image does not depend on the other images of its batch.

Reference:
    Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
    ICLR 2019, and their code for CIFAR-10-C. Two details differ: pixels are rounded to 8 bits instead of truncated,
    and the blur reflects the borders.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

Generators = Sequence[torch.Generator]


@dataclass(frozen=True)
class Corruption:
    """A corruption.

    Attributes:
        apply: Function (images, parameter, generators) → images; values outside [0, 1] are clamped afterwards.
        parameters: The parameter by severity, 1 to 5.
    """

    apply: Callable[[Tensor, float, Generators], Tensor]
    parameters: tuple[float, float, float, float, float]

    def __call__(self, images: Tensor, severity: int, generators: Generators) -> Tensor:
        """Corrupt images, (N, C, S, S) in [0, 1]."""
        return self.apply(images, self.parameters[severity - 1], generators).clamp(0, 1)


def _gaussian_noise(images: Tensor, deviation: float, generators: Generators) -> Tensor:
    noise = torch.stack([torch.randn(images.shape[1:], generator=one) for one in generators])
    return images + deviation * noise


def _shot_noise(images: Tensor, photons: float, generators: Generators) -> Tensor:
    counts = [
        torch.poisson(image * photons, generator=one) for image, one in zip(images, generators, strict=True)
    ]
    return torch.stack(counts) / photons


def _impulse_noise(images: Tensor, share: float, generators: Generators) -> Tensor:
    """Set a share of all values to 0 or 1, each with the same probability."""
    draw = torch.stack([torch.rand(images.shape[1:], generator=one) for one in generators])
    return torch.where(draw < share, (draw < share / 2).float(), images)


def _gaussian_blur(images: Tensor, sigma: float, generators: Generators) -> Tensor:
    from torchvision.transforms.v2 import functional as V

    radius = min(math.ceil(4 * sigma), images.shape[-1] - 1)
    blurred: Tensor = V.gaussian_blur(images, [2 * radius + 1] * 2, [sigma] * 2)
    return blurred


def _brightness(images: Tensor, shift: float, generators: Generators) -> Tensor:
    """Add to V of the colour space HSV, which keeps hue and saturation."""
    value = images.amax(1, keepdim=True)
    brighter = (value + shift).clamp(max=1)
    return torch.where(value > 0, images * (brighter / value.clamp(min=1e-12)), brighter)


def _contrast(images: Tensor, factor: float, generators: Generators) -> Tensor:
    mean = images.mean((2, 3), keepdim=True)
    return (images - mean) * factor + mean


def _pixelate(images: Tensor, scale: float, generators: Generators) -> Tensor:
    size, box = images.shape[-1], Image.Resampling.BOX
    small = max(1, int(size * scale))
    return _by_pillow(images, lambda picture: picture.resize((small, small), box).resize((size, size), box))


def _jpeg_compression(images: Tensor, quality: float, generators: Generators) -> Tensor:
    def compressed(picture: Image.Image) -> Image.Image:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(quality))
        return Image.open(file)

    return _by_pillow(images, compressed)


def _by_pillow(images: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    from torchvision.transforms.v2 import functional as V

    rows = images.mul(255).round_().to(torch.uint8)
    if images.shape[1] not in (1, 3):  # each channel separately
        rows = rows.flatten(0, 1)[:, None]
    made = torch.stack([V.pil_to_tensor(change(V.to_pil_image(image))) for image in rows])
    return made.view_as(images) / 255


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian-noise": Corruption(_gaussian_noise, (0.04, 0.06, 0.08, 0.09, 0.10)),
    "gaussian-blur": Corruption(_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "contrast": Corruption(_contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    "pixelate": Corruption(_pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    "brightness": Corruption(_brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    "shot-noise": Corruption(_shot_noise, (500, 250, 100, 75, 50)),
    "impulse-noise": Corruption(_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "jpeg-compression": Corruption(_jpeg_compression, (80, 65, 58, 50, 40)),
}
