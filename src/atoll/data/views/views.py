"""Augmented views of a batch: an independent draw for every image, applied on the device that holds them.

Drawing and applying are apart. `Views.draw` takes every random number from a CPU generator, so a GPU run sees
the same views; `Views.apply` has nothing random in it, and an image's view depends on that image and its own
draw alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.core.errors import UserError
from atoll.data.views import ops as ops
from atoll.data.views.ops import rotate90
from atoll.data.views.options import PRESETS, ViewOptions, ViewSettings

__all__ = ["PRESETS", "Draw", "ViewOptions", "ViewSettings", "Views", "make_views", "rotate90"]

CROP_TRIES = 10  # torchvision's: after ten crops that do not fit, the middle of the image
JITTER = (ops.adjust_brightness_, ops.adjust_contrast_, ops.adjust_saturation_, ops.adjust_hue_)
# Values of a batch that a CPU works on at a time: few enough to stay in a core's cache from one operation to
# the next, enough to hide what calling an operation costs.
CPU_CHUNK = 1 << 19


@dataclass(frozen=True)
class Draw:
    """All that chance decides about N views. Tensors on the CPU, a row for each image.

    Attributes:
        top: first source row of the crop.
        left: first source column of the crop.
        height: source rows of the crop.
        width: source columns of the crop.
        shift: (N, 2), rows and columns by which the view is then moved, over reflected borders.
        flip: whether it is flipped, left to right.
        jitter: whether its colours are jittered.
        factors: (N, 4), of brightness, contrast, saturation and hue.
        order: (N, 4), in which those four act; a permutation in each row.
        grayscale: whether it loses its colours.
        blur: whether it is blurred.
        sigma: standard deviation of that blur, in pixels.
        solarize: whether it is solarized.
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


class Views:
    """Makes views of images; `make_views` checks that the settings fit them."""

    def __init__(self, settings: ViewSettings, image_size: int, size: int, channels: int) -> None:
        self.settings = settings
        self.image_size = image_size
        self.size = size
        self.channels = channels
        # SimCLR's kernel: a tenth of the image to both sides together, and at least a neighbour on each.
        self.blur_kernel = settings.blur_kernel or max(3, 2 * (size // 10 // 2) + 1)
        strengths = (settings.brightness, settings.contrast, settings.saturation, settings.hue)
        self._jitter_steps: list[tuple[int, Callable[[Tensor, Tensor], Tensor]]] = [
            (column, step) for column, step in enumerate(JITTER) if strengths[column] > 0
        ]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """One view of every image, drawn anew.

        Shape:
            images: uint8 (N, C, H, W) on any device; result: float32 (N, C, size, size) on the same device.
        """
        return self.apply(images, self.draw(len(images), generator, images.shape[-2:]))

    def draw(
        self, n: int, generator: torch.Generator, source: tuple[int, int] | torch.Size | None = None
    ) -> Draw:
        """The random part of n views of images of a size (H, W), which is the stored images' unless given.

        The same numbers are drawn whatever the settings, in the same order. So runs that differ in their
        blur, say, see the same crops.
        """
        chosen = self.settings
        source_height, source_width = source or (self.image_size, self.image_size)
        tries = torch.rand(2, n, CROP_TRIES, generator=generator, dtype=torch.float64)
        place = torch.rand(2, n, generator=generator, dtype=torch.float64)
        shift = torch.rand(n, 2, generator=generator)
        fires = torch.rand(5, n, generator=generator)
        strength = torch.rand(n, 4, generator=generator)
        order = torch.rand(n, 4, generator=generator).argsort(stable=True)
        spread = torch.rand(n, generator=generator)

        top, left, height, width = _crop_boxes(tries, place, source_height, source_width, chosen)
        half = torch.tensor([chosen.brightness, chosen.contrast, chosen.saturation, chosen.hue])
        middle = torch.tensor([1.0, 1.0, 1.0, 0.0])
        low = torch.cat([(middle - half)[:3].clamp(min=0), -half[3:]])
        flip, jitter, grayscale, blur, solarize = (
            fires
            < torch.tensor([chosen.flip, chosen.jitter, chosen.grayscale, chosen.blur, chosen.solarize])[
                :, None
            ]
        )
        sigma_low, sigma_high = chosen.blur_sigma
        return Draw(
            top=top,
            left=left,
            height=height,
            width=width,
            shift=(shift * (2 * chosen.pad_crop + 1)).long() - chosen.pad_crop,
            flip=flip,
            jitter=jitter,
            factors=low + (middle + half - low) * strength,
            order=order,
            grayscale=grayscale,
            blur=blur,
            sigma=sigma_low + (sigma_high - sigma_low) * spread,
            solarize=solarize,
        )

    def apply(self, images: Tensor, draw: Draw) -> Tensor:
        """The views that a draw describes.

        Shape:
            images: uint8 (N, C, H, W) on any device; draw: of N views of images of that size;
            result: float32 (N, C, size, size) on the same device.

        Raises:
            ValueError: the images are not such a batch, or the draw is not for it.
        """
        self._check(images)
        if len(draw) != len(images):
            raise ValueError(f"a draw of {len(draw)} views cannot be applied to images {tuple(images.shape)}")
        pixels = self.channels * max(self.size**2, images.shape[2] * images.shape[3])
        chunk = max(1, CPU_CHUNK // pixels) if images.device.type == "cpu" else max(1, len(images))
        views = images.new_empty(len(images), self.channels, self.size, self.size, dtype=torch.float32)
        # Full precision even inside a caller's autocast region, which would round matrix products to 16 bits.
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            for start in range(0, len(images), chunk):
                rows = slice(start, start + chunk)
                views[rows] = self._view(images[rows], draw[rows])
        return views

    def plain(self, images: Tensor, normalise: bool = True) -> Tensor:
        """The images without augmentation: on [0, 1], at the views' size, normalised as the settings say.

        Args:
            images: as for a view.
            normalise: whether to subtract the mean and divide by the standard deviation. Some papers evaluate
                on [0, 1] what they trained on normalised images.

        Shape:
            images: uint8 (N, C, H, W) on any device; result: float32 (N, C, size, size) on the same device.

        Raises:
            ValueError: the images are not such a batch.
        """
        self._check(images)
        size = (self.size, self.size)
        result = images.float().div_(255)
        if result.shape[2:] != size:
            result = torch.nn.functional.interpolate(result, size, mode="bilinear", antialias=True)
        return self._normalise(result) if normalise else result

    def _check(self, images: Tensor) -> None:
        if images.ndim != 4 or images.shape[1] != self.channels or images.dtype != torch.uint8:
            raise ValueError(
                f"views are made of uint8 images (N, {self.channels}, H, W); "
                f"got {images.dtype} {tuple(images.shape)}"
            )

    def _view(self, images: Tensor, draw: Draw) -> Tensor:
        views = self._crop(images, draw)
        for place in range(len(JITTER)):
            for column, step in self._jitter_steps:
                rows = draw.jitter & (draw.order[:, place] == column)
                _on_rows(views, rows, step, draw.factors[:, column])
        _on_rows(views, draw.grayscale, ops.grayscale_)
        _on_rows(views, draw.blur, self._blur, draw.sigma)
        _on_rows(views, draw.solarize, lambda chosen: ops.solarize_(chosen, self.settings.solarize_threshold))
        return self._normalise(views)

    def _crop(self, images: Tensor, draw: Draw) -> Tensor:
        """Crop, resize, shift and flip, in two matrix products."""
        device, kind = images.device, self.settings.interpolation
        shown = torch.arange(self.size).expand(len(draw), -1)
        mirrored = torch.where(draw.flip[:, None], self.size - 1 - shown, shown)
        y = upload(ops.reflect(shown + draw.shift[:, :1], self.size), device)
        x = upload(ops.reflect(mirrored + draw.shift[:, 1:], self.size), device)
        top, left, height, width = (
            upload(each, device) for each in (draw.top, draw.left, draw.height, draw.width)
        )
        rows = ops.resize_matrix(top, height, images.shape[2], y, kind)
        columns = ops.resize_matrix(left, width, images.shape[3], x, kind)
        views = ops.separable(images.float(), rows.div_(255), columns)
        return views.clamp_(0, 1)  # the cubic overshoots, and rounding may

    def _blur(self, images: Tensor, sigma: Tensor) -> Tensor:
        matrix = ops.blur_matrix(sigma, self.blur_kernel, self.size)
        return ops.separable(images, matrix, matrix)

    def _normalise(self, views: Tensor) -> Tensor:
        mean, std = self.settings.mean, self.settings.std
        if any(mean):
            views.sub_(upload(torch.tensor(mean), views.device)[:, None, None])
        if any(value != 1 for value in std):
            views.div_(upload(torch.tensor(std), views.device)[:, None, None])
        return views


def make_views(options: ViewOptions, image_size: int, channels: int) -> Views:
    """The views that a recipe asks for, of stored images of a given size.

    Args:
        options: the recipe's ``[views]`` section.
        image_size: side of the stored images; the views' too, unless the options name another.
        channels: 3, or 1: then saturation, hue and grayscale do nothing.

    Raises:
        UserError: the settings do not fit the images.

    Example:
        >>> import torch
        >>> from atoll.data.views.views import ViewOptions, make_views
        >>> views = make_views(ViewOptions(preset="simclr"), image_size=8, channels=3)
        >>> pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
        >>> views(pixels, torch.Generator().manual_seed(0)).shape, views.plain(pixels).dtype
        (torch.Size([4, 3, 8, 8]), torch.float32)
    """
    settings, size = options.settings(), options.size or image_size
    if channels not in (1, 3):
        raise UserError(f"views are made of images of 1 or 3 channels, not {channels}; convert the images")
    for name in ("mean", "std"):
        values = getattr(settings, name)
        if len(values) not in (1, channels):
            raise UserError(
                f"views.{name} has {len(values)} values for images of {channels} channel(s) "
                f"(preset {options.preset!r}); set one value, or one for each channel"
            )
    if settings.pad_crop >= size:
        raise UserError(
            f"views.pad_crop is {settings.pad_crop}; it must be less than the views' size, {size}"
        )
    views = Views(settings, image_size, size, channels)
    if settings.blur > 0 and views.blur_kernel // 2 >= size:
        raise UserError(
            f"views.blur_kernel is {views.blur_kernel}; "
            f"for views of size {size} it must be at most {2 * size - 1}"
        )
    return views


def _crop_boxes(
    tries: Tensor, place: Tensor, height: int, width: int, settings: ViewSettings
) -> list[Tensor]:
    """Top, left, height and width of torchvision's RandomResizedCrop, for every image at once.

    Of an image's tries the first that fits is taken; where none does, as much of the middle as the ratio
    allows.
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


def _on_rows(views: Tensor, chosen: Tensor, step: Callable[..., Tensor], *parameters: Tensor) -> None:
    """Replace the chosen images by what a step makes of them; the others cost nothing."""
    rows = chosen.nonzero().squeeze(1)  # on the CPU, so that a GPU need not be waited for
    if len(rows) == 0:
        return
    there = upload(rows, views.device)
    changed = step(views.index_select(0, there), *(upload(each[rows], views.device) for each in parameters))
    views.index_copy_(0, there, changed)
