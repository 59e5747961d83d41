"""The random parameters of views, all drawn on the CPU, so that a run on a GPU sees the same views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from atoll.data.views.options import ViewSettings

CROP_TRIES = 10  # as in torchvision: after ten crops that do not fit, a centre crop


@dataclass(frozen=True)
class Draw:
    """Random parameters of N views. Tensors on the CPU, one row per image.

    Attributes:
        top: First source row of the crop.
        left: First source column of the crop.
        height: Number of source rows of the crop.
        width: Number of source columns of the crop.
        shift: (N, 2), rows and columns by which the view is shifted, with reflected borders.
        flip: Whether the view is flipped horizontally.
        jitter: Whether its colours are jittered.
        factors: (N, 4), factors of brightness, contrast, saturation and hue.
        order: (N, 4), the order in which these four are applied; a permutation in each row.
        grayscale: Whether the view is converted to grey.
        blur: Whether it is blurred.
        sigma: Standard deviation of the blur, in pixels.
        solarize: Whether it is solarized.
    """

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    shift: Tensor
    flip: Tensor
    jitter: Tensor
    factors: Tensor
    order: Tensor
    grayscale: Tensor
    blur: Tensor
    sigma: Tensor
    solarize: Tensor

    def __len__(self) -> int:
        return len(self.top)

    def __getitem__(self, rows: slice | Tensor) -> Draw:
        return Draw(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})


def draw_views(
    settings: ViewSettings,
    sizes: Sequence[int],
    source: tuple[int, int] | torch.Size,
    generators: Sequence[torch.Generator],
) -> Draw:
    """Draw the parameters of batches of views from each generator; see `atoll.data.views.views.Views.draw`.

    Args:
        settings: Settings of the operations.
        sizes: Number of views of each batch.
        source: Size (H, W) of the images.
        generators: Sources of the random draws, on the CPU.
    """
    source_height, source_width = source
    drawn = zip(*(_uniform(n, generator) for generator in generators for n in sizes), strict=True)
    tries, place, fires, shift, strength, order, spread = (
        torch.cat(each, rows) for each, rows in zip(drawn, (1, 1, 1, 0, 0, 0, 0), strict=True)
    )
    order = order.argsort(stable=True)

    top, left, height, width = _crop_boxes(tries, place, source_height, source_width, settings)
    half = torch.tensor([settings.brightness, settings.contrast, settings.saturation, settings.hue])
    middle = torch.tensor([1.0, 1.0, 1.0, 0.0])
    low = torch.cat([(middle - half)[:3].clamp(min=0), -half[3:]])
    shares = [settings.flip, settings.jitter, settings.grayscale, settings.blur, settings.solarize]
    flip, jitter, grayscale, blur, solarize = fires < torch.tensor(shares)[:, None]
    sigma_low, sigma_high = settings.blur_sigma
    return Draw(
        top=top,
        left=left,
        height=height,
        width=width,
        shift=(shift * (2 * settings.pad_crop + 1)).long() - settings.pad_crop,
        flip=flip,
        jitter=jitter,
        factors=low + (middle + half - low) * strength,
        order=order,
        grayscale=grayscale,
        blur=blur,
        sigma=sigma_low + (sigma_high - sigma_low) * spread,
        solarize=solarize,
    )


def _uniform(n: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw all numbers of a batch of n views; the order of the draws is that of the runs so far."""
    tries = torch.rand(2, n, CROP_TRIES, generator=generator, dtype=torch.float64)
    place = torch.rand(2, n, generator=generator, dtype=torch.float64)
    shift = torch.rand(n, 2, generator=generator)
    fires = torch.rand(5, n, generator=generator)
    strength, order = (torch.rand(n, 4, generator=generator) for _ in range(2))
    return tries, place, fires, shift, strength, order, torch.rand(n, generator=generator)


def _crop_boxes(
    tries: Tensor, place: Tensor, height: int, width: int, settings: ViewSettings
) -> list[Tensor]:
    """Top, left, height and width of torchvision's RandomResizedCrop, for all images at once.

    The function uses the first try that fits the image; if none fits, it uses the largest centre crop that the
    ratio allows.
    """
    if settings.crop_scale is None:
        whole = torch.zeros(tries.shape[1], dtype=torch.long)
        return [whole, whole, whole + height, whole + width]
    small, large = settings.crop_scale
    narrow, wide = settings.crop_ratio
    area = height * width * (small + (large - small) * tries[0])
    ratio = torch.exp(math.log(narrow) + (math.log(wide) - math.log(narrow)) * tries[1])
    sizes = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()]).round()
    image = torch.tensor([height, width])
    fits = ((sizes > 0) & (sizes <= image[:, None, None])).all(0)
    first = fits.int().argmax(1)[None, :, None].expand(2, -1, 1)
    chosen = sizes.gather(2, first).squeeze(2)
    corner = (place * (image[:, None] - chosen + 1)).floor()
    middle = torch.tensor([min(height, round(width / narrow)), min(width, round(height * wide))])
    box = torch.cat([corner, chosen])
    centred = torch.cat([(image - middle) // 2, middle])
    return list(torch.where(fits.any(1), box, centred[:, None]).long())
