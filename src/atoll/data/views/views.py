"""Augmented views of a batch: independent random parameters for every image, applied on the images' device.

Drawing and applying are separate. `Views.draw` takes all random numbers from a CPU generator, so a run on a GPU
sees the same views; `Views.apply` is deterministic, and the view of an image depends only on that image and its
draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.core.errors import UserError, warn
from atoll.core.text import plural
from atoll.data.views import ops as ops
from atoll.data.views.crop import plan_crops
from atoll.data.views.draws import Draw, draw_views
from atoll.data.views.jitter import plan_jitter
from atoll.data.views.ops import rotate90
from atoll.data.views.options import PRESETS, ViewOptions, ViewSettings
from atoll.data.views.transform import Transform

__all__ = ["PRESETS", "Draw", "ViewOptions", "ViewSettings", "Views", "make_views", "rotate90"]

LOCAL = "local"  # local crops are images named local1, local2, …
# Number of values of a batch that a CPU processes at a time: few enough to stay in a core's cache between
# operations, and enough to amortise the cost of calling an operation.
CPU_CHUNK = 3 << 18


class Views:
    """Augmentation of images; `make_views` checks the settings.

    Args:
        settings: Settings of the operations.
        image_size: Side of the stored images.
        size: Side of the views.
        channels: Channels of the images.

    Attributes:
        transform: The user's transform, which replaces all operations but the normalisation.
        local: Views for local crops, with ``local_size`` and ``local_scale``.
    """

    local: Views
    transform: Transform | None = None

    def __init__(self, settings: ViewSettings, image_size: int, size: int, channels: int) -> None:
        self.settings = settings
        self.image_size = image_size
        self.size = size
        self.channels = channels
        # SimCLR's kernel: about a tenth of the image's side, and at least one neighbour on each side.
        self.blur_kernel = settings.blur_kernel or max(3, 2 * (size // 10 // 2) + 1)
        strengths = (settings.brightness, settings.contrast, settings.saturation, settings.hue)
        self._jitters = any(strengths)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Draw and apply one view of every image.

        Args:
            images: The images.
            generator: Source of the random draws, on the CPU.

        Shape:
            images: uint8 (N, C, H, W) on any device; result: float32 (N, C, size, size) on the same device.
        """
        return self.make(images, [generator])[0]

    def make(
        self,
        images: Tensor,
        generators: Sequence[torch.Generator],
        layout: torch.memory_format = torch.contiguous_format,
        sizes: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Draw and apply several views of every image of one or more batches, in one pass.

        This is faster for few images, where most of the time is spent on calling operations.

        Args:
            images: The images.
            generators: Source of the random draws of each view, on the CPU.
            layout: Memory layout of the views.
            sizes: Numbers of images of consecutive batches, each of which is drawn by itself; by default all
                images are one batch, as they always are for a transform of the user's.

        Shape:
            images: uint8 (N, C, H, W) on any device; results: float32 (N, C, size, size) on the same device.

        Raises:
            ValueError: The images are not such a batch, or the batches have another number of them.
        """
        if self.transform is not None:
            self._check(images)
            made = [self.transform(images, generator, self.size, self._normalise) for generator in generators]
            return [views.contiguous(memory_format=layout) for views in made]
        if not generators:
            return []
        sizes = [len(images)] if sizes is None else sizes
        if sum(sizes) != len(images):
            raise ValueError(f"batches of {list(sizes)} images cannot be made of {len(images)}")
        draw = draw_views(self.settings, sizes, images.shape[-2:], generators)
        views = self.apply(images, draw, layout)
        return list(torch.split(views, len(images)))

    def draw(
        self, n: int, *generators: torch.Generator, source: tuple[int, int] | torch.Size | None = None
    ) -> Draw:
        """Draw the random parameters of n views from each generator, one generator's after the other's.

        All settings draw the same numbers in the same order. Runs that differ only in their blur, for example,
        therefore use the same crops.

        Args:
            n: Number of views.
            generators: Sources of the random draws, on the CPU.
            source: Size (H, W) of the images; by default that of the stored images.
        """
        return draw_views(self.settings, [n], source or (self.image_size, self.image_size), generators)

    def apply(
        self, images: Tensor, draw: Draw, layout: torch.memory_format = torch.contiguous_format
    ) -> Tensor:
        """Compute the views that a draw describes.

        Args:
            images: The images.
            draw: Random parameters of one or more views of each image: first one of every image, then the next.
            layout: Memory layout of the views.

        Shape:
            images: uint8 (N, C, H, W) on any device; result: float32 (M, C, size, size) on the same device, the
            draw's M views in its order; M is a multiple of N.

        Raises:
            ValueError: The images are not such a batch, or the draw has not as many views of each.
        """
        self._check(images)
        n, device = len(draw), images.device
        if n % len(images) if len(images) else n:
            raise ValueError(f"a draw of {n} views cannot be applied to images {tuple(images.shape)}")
        shape = (n, self.channels, self.size, self.size)
        views = torch.empty(shape, device=device, memory_format=layout)
        if n == 0:
            return views
        chunk = max(1, CPU_CHUNK // self.values(images.shape[-2:])) if device.type == "cpu" else n
        # Each chunk is sorted for the colour steps, which restore the draw's order.
        order, jitter = plan_jitter(draw, chunk, device) if self._jitters else (torch.arange(n), None)
        rows, columns = plan_crops(draw, order, self.size, self.settings.interpolation, device)
        rows.weights.div_(255)  # from 0 … 255 to [0, 1]
        shown = upload(order % len(images), device)
        with torch.no_grad():
            turned = ops.turned(images)
            for start in range(0, n, chunk):
                some = slice(start, start + chunk)
                made = ops.separable_turned(turned, shown[some], rows[some], columns[some])
                made.clamp_(0, 1)  # the cubic filter overshoots, and rounding can exceed the range
                views[some] = self._finish(made if jitter is None else jitter.apply(made, some), draw[some])
        return views

    def values(self, source: tuple[int, ...]) -> int:
        """Count the values that are computed for one view of an image.

        Args:
            source: Size (H, W) of the image.
        """
        return self.channels * max(self.size**2, math.prod(source))

    def plain(self, images: Tensor, normalise: bool = True) -> Tensor:
        """Convert images without augmentation: to [0, 1], to the size of the views, normalised as in the settings.

        Args:
            images: The images.
            normalise: Whether to subtract the mean and divide by the standard deviation. Some papers train on
                normalised images and evaluate on images in [0, 1].

        Shape:
            images: uint8 (N, C, H, W) on any device; result: float32 (N, C, size, size) on the same device.

        Raises:
            ValueError: The images are not such a batch.
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
                f"views need uint8 images (N, {self.channels}, H, W); "
                f"got {images.dtype} {tuple(images.shape)}"
            )

    def _finish(self, views: Tensor, draw: Draw) -> Tensor:
        _on_rows(views, draw.grayscale, ops.grayscale_)
        _on_rows(views, draw.blur, self._blur, draw.sigma)
        _on_rows(views, draw.solarize, lambda chosen: ops.solarize_(chosen, self.settings.solarize_threshold))
        return self._normalise(views)

    def _blur(self, images: Tensor, sigma: Tensor) -> Tensor:
        taps = ops.blur_taps(sigma, self.blur_kernel, self.size)
        return ops.separable(images, taps, taps)

    def _normalise(self, views: Tensor) -> Tensor:
        mean, std = self.settings.mean, self.settings.std
        if any(mean):
            views.sub_(upload(torch.tensor(mean), views.device)[:, None, None])
        if any(value != 1 for value in std):
            views.div_(upload(torch.tensor(std), views.device)[:, None, None])
        return views


def make_views(options: ViewOptions, image_size: int, channels: int) -> Views:
    """Create the views of a recipe for stored images of a given size.

    Args:
        options: The recipe's ``[views]`` section.
        image_size: Side of the stored images, and of the views unless the options set another.
        channels: Channels of the images; with other than 3, saturation, hue and grayscale have no effect.

    Raises:
        UserError: The settings are not valid for the images.

    Example:
        >>> import torch
        >>> from atoll.data.views.views import ViewOptions, make_views
        >>> views = make_views(ViewOptions(preset="simclr"), image_size=8, channels=3)
        >>> pixels = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
        >>> views(pixels, torch.Generator().manual_seed(0)).shape, views.plain(pixels).dtype
        (torch.Size([4, 3, 8, 8]), torch.float32)
    """
    settings, size = options.settings(), options.size or image_size
    for name in ("mean", "std"):
        values = getattr(settings, name)
        if len(values) not in (1, channels):
            raise UserError(
                f"views.{name} has {len(values)} values for images of {plural(channels, 'channel')} "
                f"(preset {options.preset!r}); set one value, or one for each channel"
            )
    smallest = min(size, options.local_size or size)
    if settings.pad_crop >= smallest:
        raise UserError(
            f"views.pad_crop is {settings.pad_crop}; it must be less than the views' size, {smallest}"
        )
    views = Views(settings, image_size, size, channels)
    views.transform = Transform(options.transform) if options.transform else None
    local = replace(settings, crop_scale=settings.local_scale)
    views.local = Views(local, image_size, options.local_size or size, channels)
    for each in (views, views.local) if options.local_size else (views,):
        if settings.blur > 0 and each.blur_kernel // 2 >= each.size:
            raise UserError(
                f"views.blur_kernel is {each.blur_kernel}; "
                f"for views of size {each.size} it must be at most {2 * each.size - 1}"
            )
    return views


def try_transform(views: Views) -> None:
    """Make a view of a noise image with the recipe's own transform, if it has one, and warn that it is slow.

    Raises:
        UserError: The transform is missing, fails, or does not return a view.
    """
    if views.transform is None:
        return
    draws, size = torch.Generator().manual_seed(0), views.image_size
    noise = torch.randint(256, (1, views.channels, size, size), dtype=torch.uint8, generator=draws)
    views(noise, draws)
    warn(
        f"views.transform = {views.transform.name!r} makes views one image at a time on the CPU, which is slower "
        "than Atoll's own"
    )


def is_local(name: str) -> bool:
    """Whether an image's name is that of a local crop."""
    return name.startswith(LOCAL)


def _on_rows(views: Tensor, chosen: Tensor, step: Callable[..., Tensor], *parameters: Tensor) -> None:
    """Apply a step to the chosen images only, in place."""
    rows = chosen.nonzero().squeeze(1)  # on the CPU, so that the GPU need not be synchronised
    if len(rows) == 0:
        return
    index = upload(rows, views.device)
    changed = step(views.index_select(0, index), *(upload(each[rows], views.device) for each in parameters))
    views.index_copy_(0, index, changed)
